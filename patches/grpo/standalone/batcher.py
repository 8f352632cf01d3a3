"""The streaming batcher: producers put samples in, each rank takes its batches out, slow ranks hold producers
back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Literal

from flashpatch.patches.grpo.errors import refuse
from flashpatch.patches.grpo.standalone.packing import Batch, Packer, Round


class StreamingBatcher:
    """Make batches for ranks from samples that arrive in any order.

    Every rank gets the same number of batches, one of each round, so that the forwards of FSDP ranks match. A
    sample is in exactly one batch that is no filler, also when a ``put`` that waits is cancelled.

    All methods belong to one event loop.

    Args:
        ranks, budget, oversize, rebalance: see `flashpatch.patches.grpo.standalone.packing.Packer`.
        depth: rounds that may wait for the slowest rank before ``put`` waits too.

    Raises:
        PatchError: an argument that cannot be meant.
    """

    def __init__(
        self,
        ranks: int,
        budget: int,
        *,
        oversize: Literal["alone", "error"] = "alone",
        rebalance: bool = True,
        depth: int = 2,
    ) -> None:
        if depth < 1:
            refuse("batcher", "depth", f"is {depth}.", "Give the number of rounds that may wait, at least 1.")
        self._packer = Packer(ranks, budget, oversize=oversize, rebalance=rebalance)
        self._queues: list[deque[Batch]] = [deque() for _ in range(ranks)]
        self._complete: deque[Round] = deque()
        self._depth = depth
        self._closed = False
        self._changed = asyncio.Condition()

    async def put(self, sample: Any, tokens: int) -> None:
        """Add a sample; wait while the slowest rank is ``depth`` rounds behind.

        The sample belongs to the batcher from the moment this is called, also if the waiting is cancelled.

        Raises:
            PatchError: the batcher is closed, or see `Packer.add`; the sample was not taken then.
        """
        if self._closed:
            refuse("batcher", "put", "was called after close.", "Make a new batcher for the next batch.")
        self._complete.extend(self._packer.add(sample, tokens))
        async with self._changed:
            self._advance()
            await self._changed.wait_for(lambda: not self._complete)

    async def close(self) -> None:
        """End the stream: waiting samples form a last round, after which every rank's `get` returns None."""
        if not self._closed:
            self._closed = True
            last = self._packer.flush()
            if last is not None:
                self._complete.append(last)
        async with self._changed:
            self._advance()
            self._changed.notify_all()

    async def get(self, rank: int) -> Batch | None:
        """Return the next batch of a rank; None when there are no more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._queues[rank] or (self._closed and not self._complete))
            batch = self._queues[rank].popleft() if self._queues[rank] else None
            self._advance()
        return batch

    async def batches(self, rank: int) -> AsyncIterator[Batch]:
        """Yield all batches of a rank."""
        while (batch := await self.get(rank)) is not None:
            yield batch

    def _advance(self) -> None:
        """Give complete rounds to all ranks at once, while all have room. Nothing waits in between, so that a
        cancellation finds a round either here or with the ranks."""
        while self._complete and max(map(len, self._queues)) < self._depth:
            for queue, batch in zip(self._queues, self._complete.popleft(), strict=True):
                queue.append(batch)
            self._changed.notify_all()
