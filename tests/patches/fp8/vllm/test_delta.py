"""Differences in bf16 into real engines, each precision: the weights that kernels read are those of a full update in float32."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import vllm_updates as updates
from vllm_lab import engines, models, scenario
from vllm_precisions import opened

pytestmark = pytest.mark.vllm


def followed(name: str, model: str, steps: int) -> dict[str, Any]:
    """Send differences of weights that were cast to bf16, then all of the last weights in float32; return checksums after
    each, what went over the wire, and which weights the engine holds in float32."""
    import torch

    import flashpatch
    from flashpatch.patches.fp8.delta.receiver import Receiver
    from flashpatch.patches.fp8.delta.sender import Sender
    from flashpatch.patches.fp8.refit import model_registry, wide_weights

    sender, receiver = Sender(), Receiver()
    random = torch.Generator().manual_seed(0)

    async def taken(sent: list[Any]) -> list[Any]:
        async def arriving() -> Any:
            for item in sent:
                yield item

        weights = await receiver.take(arriving())
        assert weights is not None, receiver.refused
        return [item async for item in weights]

    def synced(llm: Any, weights: dict[str, Any], version: str, held: str | None) -> float:
        sent = list(sender.stream(weights.items(), version, held))
        updates.send(llm, [asyncio.run(taken(sent))])
        updates.finish(llm)
        sender.sent()
        receiver.commit()
        return sender.last.facts()["share"]

    found: dict[str, Any] = dict(shares=[], different=[], full=[])
    with opened(name, model) as llm:
        weights = {key: tensor.float() * 1.001 for key, tensor in models.weights(model)}
        synced(llm, weights, "v0", None)
        found["wide"] = wide_weights.of(one.wide for one in model_registry.all_models())
        for step in range(1, steps + 1):
            for key, tensor in weights.items():
                chosen = torch.rand(tensor.shape, generator=random) < 0.01
                weights[key] = torch.where(chosen, tensor * 1.25, tensor)
            cast = {key: tensor.bfloat16() for key, tensor in weights.items()}
            found["shares"].append(synced(llm, cast, f"v{step}", receiver.version))
            found["different"].append(flashpatch.checksum(llm))
            updates.send(llm, [list(weights.items())])
            updates.finish(llm)
            found["full"].append(flashpatch.checksum(llm))
        found["answer"] = engines.greedy(llm, tokens=1)
    return found


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("bf16", "qwen2-tied"),
        pytest.param("fp8_channel", "qwen2", marks=pytest.mark.full),
        pytest.param("fp8_tensor", "qwen2", marks=pytest.mark.full),
        ("int8", "qwen2"),
        pytest.param("bf16", "qwen3-moe", marks=pytest.mark.full),
    ],
)
def test_differences_leave_what_full_updates_leave(runner: scenario.Runner, name: str, family: str) -> None:
    updates.need(family)
    found = runner(followed, name, updates.checkpoint(family, 0), 3)
    assert found["wide"] == []
    assert found["different"] == found["full"]
    assert len({str(one) for one in found["different"]}) == 3
    assert max(found["shares"]) < 0.1
