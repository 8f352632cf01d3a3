"""An engine opened with load_format="dummy", as verl opens it: the first update brings the first real weights."""

from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, oracle, scenario

pytestmark = pytest.mark.vllm

CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "bf16": ("qwen2", None, {}),
    "fp8": ("qwen2", None, dict(quantization="fp8_per_channel")),
    "tied": ("qwen2-tied", None, {}),
    "moe": ("qwen3-moe", None, {}),
    "tied-fp8": ("gemma3", None, dict(quantization="fp8_per_channel")),
    "ct-int8": ("qwen2", "int8", {}),
    "buffers": ("gemma4", None, {}),
    "buffers-fp8": ("gemma4", None, dict(quantization="fp8_per_channel")),
    "buffers-moe": ("dots1", None, {}),
}
QUICK = ("buffers",)


def first_weights(a: str, b: str, cut: int, kw: dict[str, Any]) -> dict[str, Any]:
    """Nothing but dummies, then `cut` tensors of A, then all of A in two buckets, then all of B in one."""
    with engines.open_llm(a, load_format="dummy", **kw) as llm:
        before = engines.addresses(engines.inner_model(llm))
        found: dict[str, Any] = dict(dummy=engines.answers(llm))
        items = list(models.weights(a))
        updates.send(llm, [items[:cut]])
        found["incomplete"] = updates.refusal(llm)
        updates.send(llm, [items[:cut], items[cut:]])
        updates.finish(llm)
        found["a"] = engines.answers(llm)
        updates.send(llm, [list(models.weights(b))])
        found["b"] = engines.answers(llm)
        after = engines.addresses(engines.inner_model(llm))
        found["moved"] = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return found


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.full] * (c not in QUICK)) for c in CASES]
)
def test_the_first_update_brings_the_first_weights(bf16: scenario.Runner, case: str) -> None:
    family, scheme, kw = CASES[case]
    a, b = (updates.checkpoint(family, seed, scheme) for seed in (0, 1))
    got = bf16(first_weights, a, b, 6, kw)
    assert not engines.difference(got["dummy"], oracle.answers(a, **kw)).exact
    assert "did not come" in (got["incomplete"] or "")
    assert engines.difference(got["a"], oracle.answers(a, **kw)).exact
    assert engines.difference(got["b"], oracle.answers(b, **kw)).exact
    assert got["moved"] == []
