"""SGLang agrees with the trainer's model where it is honest; a planted fault is named by the module where it is."""

import json
import sys
from pathlib import Path
from typing import Any

import lora_lab
import machine
import pytest
import sglang_lab as lab
from exact_faults import FAULTS, plant, some_full

from flashpatch.verify.exact.causes import WAYS

pytestmark = pytest.mark.sglang

SOON = ("llama", "qwen3-moe", "q and k swapped", "a layer not updated")
HONEST = (
    *("llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3"),
    *("phi3", "mistral", "smollm3", "ernie4", "granite"),
    *("gemma", "gemma3", "glm4", "olmo", "olmo2", "apertus"),  # norms and activations of their own
    *("starcoder2", "stablelm", "cohere", "persimmon", "gpt2"),
    *("qwen3-moe", "mixtral", "glm4-moe", "olmoe", "granite-moe", "ernie4-moe"),
)
AMX = ("gemma2", "deepseek-v2", "deepseek-v3", "qwen2-moe", "qwen3-next", "gpt-oss")
"""Where SGLang sees none it caps no scores, takes latents for keys, has no sinks, and needs Triton for shared experts and gated norms."""
YARN = dict(
    rope_type="yarn", factor=2.0, original_max_position_embeddings=256, mscale=1.0, mscale_all_dim=1.0
)
CHANGED: dict[str, dict[str, Any]] = {
    "olmoe": dict(num_key_value_heads=4),  # as published: SGLang's norm of keys is as wide as its queries'
    "deepseek-v2": dict(num_key_value_heads=4, rope_scaling=YARN, moe_layer_freq=1),  # SGLang needs all three
    "deepseek-v3": dict(scoring_func="sigmoid", rope_scaling=YARN, moe_layer_freq=1),
    "qwen3-next": dict(full_attention_interval=2),
}
"""What published ones of a family say, and SGLang needs."""
UNOPENED = ("gemma3", "ernie4-moe", "olmo3", *AMX)
"""By SGLang 0.5.12: the first and third are configured otherwise, its choice of ERNIE's experts fails on a CPU, and the stand-ins for AMX
are those of 0.5.23."""
PRECISIONS = (
    *(("llama", "fp8"), ("llama", "int8"), ("qwen2", "int8"), ("qwen3", "fp8"), ("glm4", "int8")),
    *(("qwen3", "float32"), ("qwen3-moe", "float32"), ("gemma3", "float32"), ("llama", "float16")),
)
SMALL = {name: lab.ENGINE[name] for name in ("device", "attention_backend", "mem_fraction_static")}


def certify(folder: Path, model: Path | str, syncs: int = 0, amx: bool = False, **engine: object) -> dict:
    """What is found in a process of its own."""
    asked = dict(model=str(model), engine={**SMALL, **engine}, syncs=syncs)
    seen = lab.bare(folder / "job", ["certify", asked], env={"STANDIN_AMX": "1"} if amx else None)
    assert seen.done, str(seen)
    return seen.steps[0]


def skip_unopened(family: str) -> None:
    if lab.OLD and family in UNOPENED:
        pytest.skip("SGLang before 0.5.21 does not open it here")


@pytest.mark.parametrize("family", some_full((*HONEST, *AMX), SOON))
def test_an_honest_engine_agrees(tmp_path: Path, family: str) -> None:
    skip_unopened(family)
    seed = family == "gpt-oss"  # 0: for some of its tokens two experts are equally likely but for rounding
    model = lab.checkpoint(tmp_path, family, int(seed), **CHANGED.get(family, {}))
    found = certify(tmp_path, model, syncs=2 * (family in SOON), amx=family in AMX)
    assert found["agrees"] and len(found["places"]) >= 15, (found["first"], found["problem"], found["syncs"])
    assert max(place["bound"] for place in found["places"]) < 0.1  # nothing agrees for want of a bound
    assert found["engine"] == "sglang" and found["syncs"] == ["", ""] * (family in SOON)


@pytest.mark.parametrize("fault", some_full(FAULTS, SOON))
def test_a_planted_fault_is_named(tmp_path: Path, fault: str) -> None:
    family, _, where, place = FAULTS[fault]
    skip_unopened(family)
    source = Path(lab.checkpoint(tmp_path, family, 0))
    served = str(plant(source, fault, tmp_path))
    found = certify(tmp_path, source, syncs=where == "tensors", amx=family in AMX, model_path=served)
    assert not found["ok"] and found["first"] == place, found["problem"]
    if where == "tensors":  # a sync brings the weights as they should be
        assert found["syncs"][0].startswith(place)


@pytest.mark.full
@pytest.mark.parametrize("alpha", [lora_lab.ALPHA, 2 * lora_lab.ALPHA])
def test_an_adapter_counts_once(tmp_path: Path, alpha: int) -> None:
    """The trainer's model has it merged, the engine serves it beside its base."""
    base = lab.checkpoint(tmp_path, "llama", 0)
    adapter = lora_lab.write(tmp_path / "adapter", lora_lab.tensors(base, 1), lora_alpha=alpha)
    found = certify(tmp_path, lora_lab.merged(base, 1), model_path=base, adapter=adapter)
    once = alpha == lora_lab.ALPHA
    assert found["first"] == (None if once else "model.layers.0.self_attn.qkv_proj"), found["problem"]
    assert len(found["places"]) >= 15


OTHERWISE = {
    # Its Llama reads ``attention_bias`` of a configuration, and not ``mlp_bias``.
    "llama-biased": ({}, "model.layers.0.mlp.gate_up_proj"),
    # Its Phi has the head's bias, and does not add it.
    "phi": ({}, "logits"),
    # Its Cohere takes the embeddings for a head, whatever ``tie_word_embeddings`` says.
    "cohere": (dict(tie_word_embeddings=False), "logits"),
    # Its windows of Cohere 2 have a token more than Hugging Face's, as vLLM's have.
    "cohere2": ({}, "into model.layers.0.self_attn.o_proj"),
    # It reads ``rope_theta`` where transformers 5 writes it per kind of layer, and takes 10,000.
    "olmo3": ({}, "into model.layers.0.self_attn.o_proj"),
    # Without AMX it takes its attention from torch, with no cap on scores.
    "gemma2": ({}, "into model.layers.0.self_attn.o_proj"),
}


@pytest.mark.full
@pytest.mark.parametrize("family", OTHERWISE)
def test_what_sglang_computes_otherwise_is_named(tmp_path: Path, family: str) -> None:
    skip_unopened(family)
    changed, place = OTHERWISE[family]
    found = certify(tmp_path, lab.checkpoint(tmp_path, family, 0, **changed))
    assert found["first"] == place and found["kl"] > 10 * found["kl_rounding"], found["problem"]


@pytest.mark.full
@pytest.mark.parametrize("read", WAYS)
def test_however_the_prompt_is_read_it_agrees(tmp_path: Path, read: str) -> None:
    found = certify(tmp_path, lab.checkpoint(tmp_path, "llama", 0), syncs=1, read=read)
    assert found["agrees"] and len(found["places"]) >= 15 and found["syncs"] == [""], found


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
@pytest.mark.parametrize(("family", "precision"), PRECISIONS)
def test_a_precision_is_no_fault(tmp_path: Path, family: str, precision: str) -> None:
    skip_unopened(family)
    model, is_rounded = lab.checkpoint(tmp_path, family, 0), precision in ("fp8", "int8")
    engine = SMALL if is_rounded else {**SMALL, "dtype": precision}
    # SGLang quantizes on no other CPU.
    on = dict(flashpatch=precision, env={"STANDIN_AMX": "1"}) if is_rounded else {}
    seen = lab.bare(tmp_path / "job", ["certify", dict(model=model, engine=engine, syncs=2)], **on)
    assert seen.done, str(seen)
    (found,) = seen.steps
    assert found["agrees"] and found["syncs"] == ["", ""], found["first"]
    assert not is_rounded or (precision in found["quantization"] and found["kl_rounding"] > 1e-3)


@pytest.mark.full
def test_the_command_opens_the_engine_that_flashpatch_asks_for(tmp_path: Path) -> None:
    """int8, and its causes, each in a process of its own."""
    command = Path(sys.executable).with_name("flashpatch-verify")
    model = lab.checkpoint(tmp_path, "llama", 0)
    whole = [command, "exact", model, "--json", "--causes", "--engine", json.dumps(SMALL)]
    done = machine.run(whole, 500, env=lab.environment(tmp_path, "int8", STANDIN_AMX="1"))
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
    found = json.loads(done.stdout)
    assert found["quantization"] == "w8a8_int8" and found["kl_rounding"] > 1e-4
    weights, *others = found["causes"]
    assert (weights["name"], weights["to"]) == ("weights", "16 bits") and weights["share"] > 0.8
    assert [one["name"] for one in others[:3]] == ["head", "batch", "cached prefix"]  # the trainer's follow
    assert not any(one["problem"] for one in others), others


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        (dict(tp_size=2), "tp_size=2, and only"),
        (dict(dp_size=2), "dp_size=2, and only"),
        (dict(lora_paths="folder"), "lora_paths=folder, and of adapters"),
        (dict(speculative_algorithm="EAGLE"), "speculative_algorithm=EAGLE, and drafts"),
        (dict(disable_cuda_graph=False), "disable_cuda_graph=False, and captured"),
    ],
)
def test_what_cannot_be_looked_into_is_refused_by_name(tmp_path: Path, engine: dict, named: str) -> None:
    from flashpatch.verify.exact import command

    model = lab.checkpoint(tmp_path, "llama", 0)
    found = command.certify(model, engine=engine, kind="sglang")
    assert found.problem.startswith(f"cannot compare here: {named}") and not found.engine
