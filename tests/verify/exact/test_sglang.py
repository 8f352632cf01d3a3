"""SGLang agrees with the trainer's model where it is honest; a planted fault is named by the module where it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sglang_lab as lab
from exact_faults import FAULTS, plant, some_full
from machine import limit

from flashpatch.verify.exact.causes import WAYS

pytestmark = pytest.mark.sglang

SOON = ("llama", "qwen2-tied", "qwen3-moe", "rope theta", "q and k swapped", "a layer not updated")
HONEST = (
    *("llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "phi3", "gemma3"),
    *("qwen3-moe", "mixtral", "glm4-moe"),
)
PLANTED = (
    "rope theta",
    "rms eps",
    "q and k swapped",
    "a layer not updated",
    "head stale",
    "experts exchanged",
)
SMALL = {name: lab.ENGINE[name] for name in ("device", "attention_backend", "mem_fraction_static")}


def certify(folder: Path, model: Path | str, syncs: int = 0, read: str = "alone", **engine: object) -> dict:
    """What is found in a process of its own."""
    asked = dict(model=str(model), engine={**SMALL, **engine}, syncs=syncs, read=read)
    seen = lab.bare(folder / "job", ["certify", asked])
    assert seen.done, str(seen)
    return seen.steps[0]


@pytest.mark.parametrize("family", some_full(HONEST, SOON))
def test_an_honest_engine_agrees(tmp_path: Path, family: str) -> None:
    if family == "gemma3" and lab.OLD:
        pytest.skip("SGLang 0.5.12 does not open it beside the transformers that it pins")
    found = certify(tmp_path, lab.checkpoint(tmp_path, family, 0), syncs=2 * (family in SOON))
    assert found["ok"] and len(found["places"]) >= 15, (found["first"], found["problem"], found["syncs"])
    assert max(place["bound"] for place in found["places"]) < 0.1  # nothing agrees for want of a bound
    assert found["engine"] == "sglang" and found["syncs"] == ["", ""] * (family in SOON)


@pytest.mark.parametrize("fault", some_full(PLANTED, SOON))
def test_a_planted_fault_is_named(tmp_path: Path, fault: str) -> None:
    family, _, where, place = FAULTS[fault]
    source = Path(lab.checkpoint(tmp_path, family, 0))
    served = str(plant(source, fault, tmp_path))
    found = certify(tmp_path, source, syncs=where == "tensors", model_path=served)
    assert not found["ok"] and found["first"] == place, found["problem"]
    if where == "tensors":  # a sync brings the weights as they should be
        assert found["syncs"][0].startswith(place)


@pytest.mark.full
def test_a_bias_that_sglang_leaves_out_is_named(tmp_path: Path) -> None:
    """SGLang's Llama reads ``attention_bias`` of a configuration, and not ``mlp_bias``."""
    found = certify(tmp_path, lab.checkpoint(tmp_path, "llama-biased", 0))
    assert found["first"] == "model.layers.0.mlp.gate_up_proj" and found["kl"] > 50 * found["kl_rounding"]


@pytest.mark.full
@pytest.mark.parametrize("read", WAYS)
def test_however_the_prompt_is_read_it_agrees(tmp_path: Path, read: str) -> None:
    found = certify(tmp_path, lab.checkpoint(tmp_path, "llama", 0), syncs=1, read=read)
    assert found["ok"] and len(found["places"]) >= 15 and found["syncs"] == [""], found


@pytest.mark.full
def test_a_trainer_that_does_not_agree_with_itself_is_not_compared(tmp_path: Path) -> None:
    """Bounds are from its two precisions: one whose positions were never computed would pass every engine."""
    from transformers import AutoModelForCausalLM

    from flashpatch.verify.exact.calls import recorded
    from flashpatch.verify.exact.compare import compare, logits
    from flashpatch.verify.exact.engine import Pass

    def load(dtype):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
        model.model.rotary_emb.inv_freq.normal_()
        return model.eval()

    path, ids = lab.checkpoint(tmp_path, "llama", 0), list(range(5, 50))
    model = load("bfloat16")
    with recorded(model) as calls:
        given = logits(model, ids)
    found = compare(load, ids, Pass(calls, given, ""))
    assert not found.ok and found.problem.endswith("in common at into model.layers.0.self_attn.o_proj")


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_rounding_to_eight_bits_is_no_fault(tmp_path: Path, precision: str) -> None:
    asked = dict(model=lab.checkpoint(tmp_path, "llama", 0), engine=SMALL, syncs=2)
    on = dict(flashpatch=precision, env={"STANDIN_AMX": "1"})  # SGLang quantizes on no other CPU
    seen = lab.bare(tmp_path / "job", ["certify", asked], **on)
    assert seen.done, str(seen)
    (found,) = seen.steps
    assert found["ok"] and found["kl_rounding"] > 1e-3 and found["syncs"] == ["", ""], found["first"]
    assert precision in found["quantization"]


@pytest.mark.full
def test_the_command_opens_the_engine_that_flashpatch_asks_for(tmp_path: Path) -> None:
    """int8, and its causes, each in a process of its own."""
    command = Path(sys.executable).with_name("flashpatch-verify")
    model = lab.checkpoint(tmp_path, "llama", 0)
    done = subprocess.run(
        [command, "exact", model, "--json", "--causes", "--engine", json.dumps(SMALL)],
        env=lab.environment(tmp_path, "int8", STANDIN_AMX="1"),
        capture_output=True,
        text=True,
        timeout=limit(500),
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
    found = json.loads(done.stdout)
    assert found["quantization"] == "w8a8_int8" and found["kl_rounding"] > 1e-4
    weights, *others = found["causes"]
    assert (weights["name"], weights["to"]) == ("weights", "16 bits") and weights["share"] > 0.8
    assert [one["name"] for one in others] == ["head", "batch", "cached prefix"]
    assert not any(one["problem"] for one in others), others


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        (dict(tp_size=2), "tp_size=2, and only"),
        (dict(dp_size=2), "dp_size=2, and only"),
        (dict(adapter="folder"), "adapter=folder, and on SGLang"),
        (dict(speculative_algorithm="EAGLE"), "speculative_algorithm=EAGLE, and drafts"),
        (dict(disable_cuda_graph=False), "disable_cuda_graph=False, and captured"),
    ],
)
def test_what_cannot_be_looked_into_is_refused_by_name(tmp_path: Path, engine: dict, named: str) -> None:
    from flashpatch.verify.exact import command

    model = lab.checkpoint(tmp_path, "llama", 0)
    found = command.certify(model, engine=engine, kind="sglang")
    assert found.problem.startswith(f"cannot compare here: {named}") and not found.engine
