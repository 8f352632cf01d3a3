"""Each precision by its name: from a bf16 model, or a template, to an engine that takes the trainer's bf16 weights."""

from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, oracle, quantized, scenario
from vllm_precisions import A, B, check, int8, opened, there_and_back

pytestmark = pytest.mark.vllm

_FULL = pytest.mark.full


@pytest.mark.parametrize(
    "family",
    [
        "qwen2-tied",
        *(
            pytest.param(f, marks=_FULL)
            for f in ("qwen2", "llama", "llama-biased", "gemma3", "phi3", "qwen3")
        ),
    ],
)
def test_int8_without_a_template(runner: scenario.Runner, family: str) -> None:
    a, b = (updates.checkpoint(family, seed) for seed in (0, 1))
    seed = updates.seed_of_the_day()
    found = runner(there_and_back, "int8", a, [b, a, b], seed)
    want = [int8(family, seed) for seed in (0, 1)]
    assert engines.difference(*want).mean > 0.01
    check(found, [want[i % 2] for i in range(4)])
    assert found["kernels"] == {"CompressedTensorsW8A8Int8/CPUInt8ScaledMMLinearKernel": 8}
    assert found["precision"] == "int8"


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("int8", "int8"),
        pytest.param("fp8", "fp8-channel", marks=_FULL),
        pytest.param("fp8", "fp8-tensor", marks=_FULL),
    ],
)
def test_a_quantized_checkpoint_is_the_template(runner: scenario.Runner, name: str, scheme: str) -> None:
    template = updates.checkpoint(*A, scheme)
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    found = runner(there_and_back, name, template, [b, a], updates.seed_of_the_day())
    want = [oracle.answers(updates.checkpoint("qwen2", seed, scheme)) for seed in (0, 1)]
    check(found, [want[0], want[1], want[0]])


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        pytest.param("fp8_channel", dict(quantization="fp8_per_channel"), marks=_FULL),
        ("fp8_tensor", dict(quantization="fp8_per_tensor")),
        pytest.param("int8_weight_only", quantized.torchao("Int8WeightOnlyConfig"), marks=_FULL),
    ],
)
def test_engines_own_precisions_by_name(runner: scenario.Runner, name: str, stock: dict[str, Any]) -> None:
    if name == "int8_weight_only":
        pytest.importorskip("torchao")
    a, b = updates.checkpoint(*A), updates.checkpoint(*B)
    found = runner(there_and_back, name, a, [b, a], updates.seed_of_the_day())
    want = [oracle.answers(source, **stock) for source in (a, b)]
    check(found, [want[0], want[1], want[0]])
    assert found["precision"] == name and not any("Unquantized" in kernel for kernel in found["kernels"])
    if name.startswith("fp8"):
        assert all(kernel.endswith("/FlashPatchCPUFP8LinearKernel") for kernel in found["kernels"])


def sampled(name: str, model: str, **options: Any) -> dict[str, Any]:
    """Logprobs of tokens drawn at temperature 0.5 from the 4 likeliest, and the mode the engine is in."""
    from vllm import SamplingParams

    from flashpatch import ledger

    with opened(name, model, options=options) as llm:
        parameters = SamplingParams(
            temperature=0.5, top_k=4, seed=1, max_tokens=8, logprobs=4, ignore_eos=True, detokenize=False
        )
        [output] = llm.generate({"prompt_token_ids": list(engines.PROMPTS[0])}, parameters, use_tqdm=False)
        steps = [[entry.logprob for entry in step.values()] for step in output.outputs[0].logprobs]
        dtype = str(engines.inner_model(llm).logits_processor.head_dtype)
        notes = ledger.notes()
    rows = [sorted(row)[-4:] for row in steps]
    return dict(rows=rows, head=dtype, mode=notes["logprobs"], lm_head=notes.get("lm_head"))


@pytest.mark.vllm(least="0.26")  # before, a patch computes the head: test_float32_head.py
def test_logprobs_are_those_that_tokens_were_drawn_with(runner: scenario.Runner) -> None:
    from math import exp

    a = updates.checkpoint(*A)
    exact = runner(sampled, "bf16", a, lm_head="float32")
    assert exact["mode"] == "processed_logprobs"
    assert exact["lm_head"] == "float32" and exact["head"] == "torch.float32"
    for row in exact["rows"]:
        assert sum(map(exp, row)) == pytest.approx(1, abs=1e-5)  # the 4 that could be drawn are all there is
    raw = runner(sampled, "bf16", a, logprobs="asked")
    assert raw["mode"] == "raw_logprobs" and raw["head"] == "torch.bfloat16"
    assert max(sum(map(exp, row)) for row in raw["rows"]) < 0.99
