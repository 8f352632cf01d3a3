"""With lm_head=float32 logits are the float32 product of the head, on every vLLM, also after an update; without it, rounded."""

from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, scenario
from vllm_precisions import A, B, opened

pytestmark = pytest.mark.vllm


def away(name: str, model: str, **options: Any) -> list[float]:
    """Return how far an engine's logits are from float64 products at most, on two policies in turn."""
    import torch

    found = []
    with opened(name, model, options=options) as llm:
        inner = engines.inner_model(llm)
        for source in (None, updates.checkpoint(*B)):
            if source is not None:
                updates.send(llm, [list(models.weights(source))])
            random = torch.Generator().manual_seed(1)
            hidden = torch.randn(5, inner.config.hidden_size, generator=random).bfloat16()
            logits = inner.compute_logits(hidden).double()
            exact = hidden.double() @ inner.lm_head.weight.double().t()
            found.append(float((logits - exact[:, : logits.shape[1]]).abs().max()))
    return found


def test_logits_are_float32_products(runner: scenario.Runner) -> None:
    a = updates.checkpoint(*A)
    plain, exact = runner(away, "bf16", a), runner(away, "bf16", a, lm_head="float32")
    assert max(exact) < 1e-4 < 1e-3 < min(plain)


@pytest.mark.full
def test_beside_fp8_layers(runner: scenario.Runner) -> None:
    assert max(runner(away, "fp8", updates.checkpoint(*A), lm_head="float32")) < 1e-4
