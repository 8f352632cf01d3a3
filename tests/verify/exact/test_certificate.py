"""Honest engines agree with the trainer's model; a planted fault is named by the module where it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lora_lab
import pytest
from exact_faults import FAULTS, plant
from machine import limit
from vllm_lab import models

pytestmark = [pytest.mark.vllm]

SOON = ("q and k swapped", "rope theta")
HONEST = ("llama",)
MORE = (
    *("qwen2", "qwen2-tied", "llama-tied", "llama-biased", "qwen3", "phi3", "gemma2", "gemma3"),
    *("qwen3-moe", "mixtral", "glm4-moe", "olmoe", "gpt-oss"),
    *("qwen3-next", "mamba2", "granite-moe-hybrid", "nemotron-h"),
)
SMALL = {"kv_cache_memory_bytes": 16 << 20}


def _some_full(names, soon):
    return [
        pytest.param(name, marks=() if name in soon else pytest.mark.full, id=str(name)) for name in names
    ]


@pytest.fixture
def certify(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from flashpatch.verify.exact import command

    return lambda path, syncs=0, **engine: command.certify(str(path), "", {**SMALL, **engine}, syncs)


@pytest.mark.parametrize("family", _some_full((*HONEST, *MORE), HONEST))
def test_an_honest_engine_agrees(certify, tmp_path, family: str) -> None:
    found = certify(models.checkpoint(tmp_path, family), syncs=2 * (family in HONEST))
    assert found.ok and len(found.places) >= 15, (found.first, found.problem, found.syncs)
    assert found.syncs == ("", "") or family not in HONEST


@pytest.mark.parametrize("precision", _some_full(("int8", "fp8"), ("int8",)))
def test_rounding_to_eight_bits_is_no_fault(tmp_path, precision: str) -> None:
    """As a command, with the engine in the precision that FLASHPATCH gives it."""
    model = models.checkpoint(tmp_path, "llama")
    command = [
        Path(sys.executable).with_name("flashpatch-verify"),
        "exact",
        str(model),
        "--json",
        "--syncs=2",
        "--engine",
        json.dumps(SMALL),
    ]
    variables = {**os.environ, "FLASHPATCH": precision, "FLASHPATCH_LEDGER": str(tmp_path / "ledger")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=limit(300))
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert found["ok"] and found["kl_rounding"] > 1e-4 and found["syncs"] == ["", ""]


@pytest.mark.parametrize("fault", _some_full(FAULTS, SOON))
def test_a_planted_fault_is_named(certify, tmp_path, fault: str) -> None:
    family, _, where, place = FAULTS[fault]
    source = models.checkpoint(tmp_path, family)
    found = certify(source, syncs=2 * (fault in SOON), model=str(plant(source, fault, tmp_path)))
    assert not found.ok and found.first.name == place
    if fault in SOON:  # a sync brings the weights as they should be
        assert found.syncs == (place if where == "tensors" else "",) * 2


@pytest.mark.full
@pytest.mark.parametrize("alpha", [lora_lab.ALPHA, 2 * lora_lab.ALPHA])
def test_an_adapter_counts_once(certify, tmp_path, alpha: int) -> None:
    """The trainer's model has it merged, the engine serves it beside its base."""
    base = models.checkpoint(tmp_path, "llama")
    adapter = lora_lab.write(tmp_path / "adapter", lora_lab.tensors(str(base), 1), lora_alpha=alpha)
    served = dict(model=str(base), adapter=adapter, max_lora_rank=8, max_loras=1)
    found = certify(lora_lab.merged(str(base), 1), **served)
    assert (
        found.first is None
        if alpha == lora_lab.ALPHA
        else found.first.name == "model.layers.0.self_attn.qkv_proj"
    )
