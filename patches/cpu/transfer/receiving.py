"""Receive the weights of one transfer, and tell the others if they cannot be used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import torch

from flashpatch.patches.cpu.transfer.buckets import Joiner
from flashpatch.patches.cpu.transfer.errors import as_text, transfer_error
from flashpatch.patches.cpu.transfer.exchange import Line


class Receiving:
    """Receive one bucket ahead of what is being loaded."""

    def __init__(self, line: Line) -> None:
        self._line, self._joiner = line, Joiner()
        self._complete = False

    async def weights(self, step: int | None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield what is sent, if it is of this version; see `ObjectStoreEngine.receive_weights`."""
        self._line.version = f"version {step}"
        task = asyncio.current_task()
        if task is not None:
            task.add_done_callback(self._taken)
        coming = self._ask(step)
        try:
            while not isinstance(bucket := await coming, dict):
                self._joiner.contents.buckets += 1
                coming = self._ask(step)
                for name, tensor in self._joiner.take(*bucket):
                    yield name, tensor
                del bucket  # its memory in the object store, before the next one arrives
            self._check(bucket)
            self._complete = True
            self._line.ask("take", self._line.rank, self._joiner.contents.buckets + 1)
        except Exception as error:
            self._line.fail(as_text(error))
            raise
        finally:
            coming.cancel()
            if not self._complete:
                self._line.fail("the weights were not taken to their end")

    def _taken(self, task: asyncio.Task[Any]) -> None:
        """Report the failure of the task that loads the weights: a generator sees nothing of it."""
        if self._complete:
            return
        error = None if task.cancelled() else task.exception()
        self._line.fail(as_text(error) if error else "loading ended before the last weight")

    def _ask(self, step: int | None) -> asyncio.Task[Any]:
        """Ask for the next bucket at once, and fetch it while the one before is loaded."""
        asked = self._line.ask("take", self._line.rank, self._joiner.contents.buckets)
        coming = asyncio.create_task(self._fetched(asked, step))
        coming.add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )  # also if it is never awaited
        return coming

    async def _fetched(self, asked: Any, step: int | None) -> Any:
        """Return a bucket: its pieces, and ``(length,)`` uint8. After the last, what the sender counted.

        Raises:
            PatchError: it did not come, or is of another version than this process is to get.
        """
        sent, item = await self._line.answer(asked)
        if sent != step:
            raise transfer_error(
                f"rollout rank {self._line.rank} is to get version {step}, and the trainer sends version {sent}."
            )
        return await self._line.answer(item[0]) if isinstance(item, list) else item

    def _check(self, sent: dict[str, Any]) -> None:
        """Compare what arrived with what the sender counted.

        Raises:
            PatchError: they differ.
        """
        mine = self._joiner.contents.summary()
        if (unfinished := self._joiner.unfinished()) or mine != sent:
            raise transfer_error(
                f"rollout rank {self._line.rank} received {mine} of {self._line.version}, and {sent} was sent"
                + (f"; the end of {unfinished} is missing." if unfinished else ".")
            )
