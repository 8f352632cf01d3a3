"""Every family in every precision: after an update the engine answers as a fresh one, to the last bit.

A cell opens an engine on A and brings it to B, back to A and to B again: once in one call, twice in buckets
cut and shuffled from a printed seed (FLASHPATCH_LAB_SEED repeats it). A
cell that is wrong without an error fails, and so does one that no longer does what is written here."""

import random
from typing import Any

import pytest
import vllm_updates as updates
from installed import version_of
from packaging.version import Version
from vllm_lab import engines, environment, models, oracle, quantized, scenario

pytestmark = pytest.mark.vllm

FAMILIES = ("qwen2", "qwen2-tied", "llama", "llama-biased", "qwen3-moe", "gemma3", "glm4-moe", "phi3")


#: name -> (engine keywords, scheme of the checkpoint)
PRECISIONS: dict[str, tuple[dict[str, Any], str | None]] = {
    "bf16": ({}, None),
    "fp32": (dict(dtype="float32"), None),
    "fp8_per_channel": (dict(quantization="fp8_per_channel"), None),
    "fp8_per_tensor": (dict(quantization="fp8_per_tensor"), None),
    "ct-int8": ({}, "int8"),
    "ct-fp8-channel": ({}, "fp8-channel"),
    "ct-fp8-tensor": ({}, "fp8-tensor"),
    "ct-w4a16": ({}, "w4a16"),
    "torchao-int8wo": (quantized.torchao("Int8WeightOnlyConfig"), None),
    "torchao-int8dyn": (quantized.torchao("Int8DynamicActivationInt8WeightConfig"), None),
}

#: What a cell does if not "exact". On a CPU, vLLM has no experts in these precisions, and 4 bits need AVX-512.
EXPECTED: dict[tuple[str, str], str] = {
    (family, precision): "no engine"
    for family in ("qwen3-moe", "glm4-moe")
    for precision in PRECISIONS
    if precision.startswith(("fp8", "ct-"))
}
if version_of("vllm") < Version("0.28"):  # which opens those experts
    del EXPECTED["qwen3-moe", "ct-w4a16"]
if Version("0.25") < version_of("vllm") < Version("0.28"):
    del EXPECTED["qwen3-moe", "ct-int8"]
if not environment.avx512():
    EXPECTED.update({(family, "ct-w4a16"): "no engine" for family in FAMILIES})

QUICK = {("qwen2", "bf16"), ("qwen2", "ct-int8"), ("qwen3-moe", "bf16"), ("llama", "fp8_per_channel")}


def cell(a: str, b: str, kw: dict[str, Any], seed: int) -> dict[str, Any]:
    """B in one call, then A and B in fuzzed buckets; answers after each, and what lost its place."""
    rng = random.Random(seed)
    with engines.open_llm(a, **kw) as llm:
        model = engines.inner_model(llm)
        found: dict[str, Any] = dict(model=type(model).__name__, answers=[engines.answers(llm)], moved=[])
        before = engines.addresses(model)
        for number, source in enumerate((b, a, b)):
            items = list(models.weights(source))
            try:
                (updates.sync if number else updates.send)(
                    llm, updates.buckets(items, rng) if number else [items]
                )
                if number or rng.random() < 0.5:  # a sender whose order changes names its end
                    updates.finish(llm)
                found["answers"].append(engines.answers(llm))
            except Exception as error:
                return dict(found, refused=f"{type(error).__name__}: {error}")
            after = engines.addresses(model)
            found["moved"] += sorted(k for k in {*before, *after} if before.get(k) != after.get(k))
    return found


def check(run: scenario.Runner, family: str, precision: str) -> None:
    kw, scheme = PRECISIONS[precision]
    updates.need(family)
    a, b = (updates.checkpoint(family, seed, scheme) for seed in (0, 1))
    expected = EXPECTED.get((family, precision), "exact")
    seed = updates.seed_of_the_day()
    if expected == "no engine":  # stock vLLM cannot even open it here
        with pytest.raises(scenario.ScenarioError, match="MoE backend|cpu_gemm_wna16"):
            oracle.answers(a, **kw)
        return
    want = [oracle.answers(source, **kw) for source in (a, b)]
    assert engines.difference(*want).mean > 0.01, "A and B answer alike: nothing would be shown"
    got = run(cell, a, b, kw, seed, timeout=240)
    assert engines.difference(got["answers"][0], want[0]).exact, (
        "the patch changed an engine that was only opened"
    )
    gaps = [engines.difference(x, want[(i + 1) % 2]) for i, x in enumerate(got["answers"][1:])]
    wrong = [gap for gap in gaps if not gap.exact]
    word = "WRONG" if wrong else "refused" if "refused" in got else "moved" if got["moved"] else "exact"
    assert word == expected, f"seed {seed}: {wrong} {got['moved'][:5]} {got.get('refused')}"


CELLS = [
    pytest.param(family, precision, marks=[] if (family, precision) in QUICK else pytest.mark.full)
    for family in FAMILIES
    for precision in PRECISIONS
]


@pytest.mark.parametrize(("family", "precision"), CELLS)
def test_a_to_b_to_a_to_b(bf16: scenario.Runner, family: str, precision: str) -> None:
    if precision.startswith("torchao"):
        pytest.importorskip("torchao")
    check(bf16, family, precision)
