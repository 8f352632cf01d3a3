"""Fifty random differences into models like vLLM's: every live tensor has the bits of a fresh model's."""

from __future__ import annotations

import asyncio

import pytest

torch = pytest.importorskip("torch")

import fp8_toys as toys  # noqa: E402
from fp8_toy_methods import METHODS  # noqa: E402

from flashpatch.patches.fp8.delta import wire  # noqa: E402
from flashpatch.patches.fp8.delta.receiver import Receiver  # noqa: E402
from flashpatch.patches.fp8.delta.sender import Sender  # noqa: E402


async def taken(receiver: Receiver, sent):
    async def arriving():
        for item in sent:
            yield item

    weights = await receiver.take(arriving())
    assert weights is not None, receiver.refused
    return [item async for item in weights]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_fifty_differences(method):
    random = torch.Generator().manual_seed(0)
    weights = toys.checkpoint(0)
    engine = toys.engine(method)
    sender, receiver, held, patches = Sender(), Receiver(), None, 0
    for number in range(51):
        sent = list(sender.stream(weights, f"v{number}", held))
        patches += sum(wire.of_patch(name) is not None for name, _ in sent)
        sender.sent()
        engine.update(asyncio.run(taken(receiver, sent)))
        receiver.commit()
        held = receiver.version
        assert toys.same_bits(toys.state(engine.model), toys.state(toys.fresh(method, weights))), number
        weights = [(name, changed(tensor, random)) for name, tensor in weights]
    assert patches > 50 and engine.managed.version == 51


def changed(tensor, random):
    """Some 3 % of the values, so that a toy's tensors of 16 change often enough."""
    chosen = torch.rand(tensor.shape, generator=random) < 0.03
    return torch.where(chosen, torch.randn(tensor.shape, generator=random), tensor)
