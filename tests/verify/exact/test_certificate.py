"""Honest engines agree with the trainer's model; a planted fault is named by the module where it is."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lora_lab
import machine
import pytest
from exact_faults import FAULTS, plant, some_full
from installed import version_of
from packaging.version import Version
from vllm_lab import environment, models, scenario

from flashpatch.verify.exact.certificate import DISTRIBUTIONS

pytestmark = [pytest.mark.vllm]

SOON = ("q and k swapped", "rows stale", "experts exchanged")
HONEST = ("llama", "qwen3-moe")
SYNCED = ("llama", "qwen2-tied")
MORE = ("qwen2-tied", "llama-tied", "llama-biased", "llama3.1")  # other architectures: `test_sweep`
SMALL = {"kv_cache_memory_bytes": 16 << 20}


def certified(path: str, syncs: int = 0, **engine: Any) -> dict[str, Any]:
    from flashpatch.verify.exact import command

    return command.certify(path, "", {**SMALL, **engine}, syncs).as_json()


@pytest.fixture(scope="module")
def runner() -> Iterator[scenario.Runner]:
    with scenario.Runner() as interpreter:
        yield interpreter


@pytest.fixture
def certify(runner):
    def certify(path: Path | str, *arguments: Any, **engine: Any) -> SimpleNamespace:
        return SimpleNamespace(**runner(certified, str(path), *arguments, **engine))

    return certify


@pytest.mark.parametrize("family", some_full((*HONEST, *MORE), HONEST))
def test_an_honest_engine_agrees(certify, tmp_path, family: str) -> None:
    path = models.checkpoint(tmp_path, family)
    [file.unlink() for file in path.glob("tokenizer*") if family == "llama"]  # none is needed
    found = certify(path, syncs=2 * (family in SYNCED))
    assert found.agrees and len(found.places) >= 15, (found.first, found.problem, found.syncs)
    assert found.syncs == ["", ""] or family not in SYNCED


def _with_outliers(folder: Path) -> Path:
    """A model that computes the same with one channel far larger, as real ones have: eight bits round its inputs coarsely."""
    from safetensors.torch import load_file, save_file

    model = models.checkpoint(folder, "llama")
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[7] *= 64
        elif name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            tensor[:, 7] /= 64
    save_file(tensors, file, metadata={"format": "pt"})
    return model


def _printed(model: Path, precision: str, /, *options: str, status: int = 0, **engine: object) -> dict:
    """What the command prints of a model, with the engine in the precision that FLASHPATCH gives it."""
    command = [Path(sys.executable).with_name("flashpatch-verify"), "exact", model]
    variables = {**os.environ, "FLASHPATCH": precision, "FLASHPATCH_LEDGER": str(model.parent / "ledger")}
    command += ["--json", "--engine", json.dumps({**SMALL, **engine}), *options]
    done = machine.run(command, 300, env=variables)
    assert done.returncode == status, (done.stdout[-2000:], done.stderr[-2000:])
    return json.loads(done.stdout)


@pytest.mark.parametrize("precision", some_full(("int8", "fp8"), ()))
def test_rounding_to_eight_bits_is_no_fault(tmp_path, precision: str) -> None:
    found = _printed(_with_outliers(tmp_path), precision, "--syncs=2")
    assert found["ok"] and found["kl_rounding"] > 1e-4 and found["syncs"] == ["", ""]


@pytest.mark.parametrize("precision", some_full(("int8", "fp8"), ("fp8",)))
def test_what_is_as_small_as_rounding_is_named(tmp_path, precision: str) -> None:
    source = models.checkpoint(tmp_path, "llama-biased")
    served = str(plant(source, "as small as rounding", tmp_path))
    found = _printed(source, precision, status=1, model=served)
    named = [place["name"] for place in found["places"] if place["gap"] > place["bound"]]
    attention = "model.layers.1.self_attn.qkv_proj"
    assert named == ["model.layers.0.mlp.down_proj", attention, "model.layers.1.mlp.down_proj"]


def test_what_an_engine_raises_is_said(certify, tmp_path) -> None:
    found = certify(models.checkpoint(tmp_path, "llama"), max_model_len=-7)
    assert found.problem.startswith("cannot compare here: ") and "max_model_len" in found.problem


@pytest.mark.full
def test_experts_that_a_sync_leaves_wrong_are_named(certify, tmp_path) -> None:
    """Those of vLLM 0.31 and 0.32 on a CPU compute something else after `reload_weights`, but where a precision is armed."""
    model = models.checkpoint(tmp_path, "qwen3-moe")
    wrong = version_of("vllm") >= Version("0.31")
    assert certify(model, syncs=1).syncs == ["model.layers.0.mlp.experts" if wrong else ""]
    assert _printed(model, "bf16", "--syncs=2")["syncs"] == ["", ""]


@pytest.mark.full
def test_the_weights_have_the_largest_share(tmp_path) -> None:
    found = _printed(_with_outliers(tmp_path), "int8", "--causes")
    weights, *others = found["causes"]
    assert (weights["name"], weights["to"]) == ("weights", "16 bits"), found["causes"]
    assert weights["share"] == pytest.approx(1 - weights["kl"] / found["kl"]) and weights["share"] > 0.8
    for cause in others:
        assert not cause["problem"] and abs(cause["share"]) < 0.5, cause


CUT = dict(enable_chunked_prefill=True, max_num_batched_tokens=16, max_num_seqs=1)
CACHE = dict(enable_prefix_caching=True, block_size=32)


@pytest.mark.full
@pytest.mark.parametrize(("read", "engine"), [("alone", CUT), ("cached", CACHE)])
def test_however_the_prompt_is_read_it_agrees(certify, tmp_path, read: str, engine: dict) -> None:
    found = certify(models.checkpoint(tmp_path, "llama"), syncs=1, read=read, **engine)
    assert found.agrees and len(found.places) >= 15 and found.syncs == [""], (found.first, found.problem)
    assert found.ok == (read == "alone")  # the other ways have no decode steps


@pytest.mark.full
def test_a_prompt_that_is_not_read_so_is_not_compared(certify, tmp_path) -> None:
    found = certify(models.checkpoint(tmp_path, "llama"), read="cached")
    assert found.problem.startswith("cannot compare here: the engine does not read 32 tokens from")


@pytest.mark.full
def test_a_head_that_the_engine_leaves_in_its_dtype_is_not_called_float32(certify, tmp_path) -> None:
    found = certify(models.checkpoint(tmp_path, "llama"), hf_overrides={"head_dtype": "float32"})
    if version_of("vllm") >= Version("0.26"):
        assert found.ok, found.first
    else:
        assert found.problem.endswith("leaves the head in bfloat16, whatever head_dtype says")


@pytest.mark.full
def test_a_compiled_engine_is_compared_by_its_tables_and_distributions(tmp_path) -> None:
    model = str(models.checkpoint(tmp_path, "llama"))
    found = scenario.run(certified, model, enforce_eager=False, env=environment.COMPILED)
    named = {place["name"] for place in found["places"]}
    assert named == {"model.embed_tokens", DISTRIBUTIONS} and not found["first"], found
    unseen = "its modules, which a compiled engine does not show, and its decode steps"
    assert found["not_compared"] == [unseen]
    assert not found["ok"] and not found["problem"]


@pytest.mark.parametrize("fault", some_full(FAULTS, SOON))
def test_a_planted_fault_is_named(certify, tmp_path, fault: str) -> None:
    family, _, where, place = FAULTS[fault]
    source = models.checkpoint(tmp_path, family)
    synced = fault in SOON and family in SYNCED
    found = certify(source, syncs=2 * synced, model=str(plant(source, fault, tmp_path)))
    assert not found.ok and found.first == place
    if synced:  # a sync brings the weights as they should be
        changed = [name.partition(",")[0] for name in found.syncs]
        assert changed == [place if where == "tensors" else ""] * 2


@pytest.mark.full
def test_a_norm_that_the_trainer_does_not_group_is_named(certify, tmp_path) -> None:
    """Hugging Face's Mamba-2 normalizes over all groups at once, vLLM over each, as the authors' code does."""
    found = certify(models.checkpoint(tmp_path, "mamba2"))
    assert found.first == "backbone.layers.0.mixer.norm" and found.kl > 100 * found.kl_rounding


@pytest.mark.full
@pytest.mark.parametrize("alpha", [lora_lab.ALPHA, 2 * lora_lab.ALPHA])
def test_an_adapter_counts_once(certify, tmp_path, alpha: int) -> None:
    """The trainer's model has it merged, the engine serves it beside its base."""
    base = models.checkpoint(tmp_path, "llama")
    adapter = lora_lab.write(tmp_path / "adapter", lora_lab.tensors(str(base), 1), lora_alpha=alpha)
    served = dict(model=str(base), adapter=adapter, max_lora_rank=8, max_loras=1)
    found = certify(lora_lab.merged(str(base), 1), **served)
    assert found.first == (None if alpha == lora_lab.ALPHA else "model.layers.0.self_attn.qkv_proj")
