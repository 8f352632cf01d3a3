"""Send a LoRA adapter, and if needed its base, through verl's checkpoint engines in one stream of tensors.

A checkpoint engine carries names and tensors alone, so the adapter's configuration travels as a tensor of bytes whose name
is no parameter's: one before the base, one before the adapter. They cut the stream into the calls of
``ServerAdapter.update_weights`` that verl makes itself if trainer and rollout share a process.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    Named = tuple[str, torch.Tensor]

MARK = "__flashpatch_adapter__"
_ALIGN = 512  # bytes: what is packed behind a mark stays aligned


def marked(weights: Iterable[Named], peft_config: Mapping[str, Any], base_sync_done: bool) -> Iterator[Named]:
    """Yield a mark, then the weights.

    Args:
        weights: names and tensors of the base or of the adapter.
        peft_config: ``peft.LoraConfig.to_dict()``.
        base_sync_done: whether these are the adapter's tensors, not the base's.
    """
    import torch

    content = {"peft_config": peft_config, "base_sync_done": base_sync_done}
    data = json.dumps(content, default=_plain).encode()
    data += b" " * (-len(data) % _ALIGN)
    rest = iter(weights)
    first = next(rest, None)
    device = "cpu" if first is None else first[1].device
    yield f"{MARK}{int(base_sync_done)}", torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    if first is not None:
        yield first
        yield from rest


def _plain(value: Any) -> Any:
    """Return what JSON knows in place of a set, an enumeration's member, or another object of a configuration."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return getattr(value, "value", None) or str(value)


class Parts:
    """Cut a stream of names and tensors at its marks.

    Args:
        weights: what a checkpoint engine receives.
    """

    def __init__(self, weights: AsyncIterator[Named]) -> None:
        self._weights = aiter(weights)
        self._head: Named | None = None

    async def __aiter__(self) -> AsyncIterator[tuple[AsyncIterator[Named], dict[str, Any]]]:
        """Yield each part with the arguments of verl's update that its mark holds; empty ones for a stream without marks."""
        self._head = await anext(self._weights, None)
        while True:
            told: dict[str, Any] = {}
            if self._head is not None and self._head[0].startswith(MARK):
                told = json.loads(self._head[1].detach().cpu().numpy().tobytes())
                self._head = None
            yield self._part(), told
            if self._head is None:
                return

    async def _part(self) -> AsyncIterator[Named]:
        """Yield tensors until the next mark, which stays in ``_head``."""
        if self._head is not None:
            head, self._head = self._head, None
            yield head
        async for item in self._weights:
            if item[0].startswith(MARK):
                self._head = item
                return
            yield item
