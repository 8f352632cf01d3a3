"""Receive the weights of one transfer, and tell the sender when they cannot be used."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from flashpatch.patches.cpu.gloo_transfer.broadcast import GlooGroup
from flashpatch.patches.cpu.gloo_transfer.buckets import Joiner, Piece, checksum
from flashpatch.patches.cpu.gloo_transfer.control import Receiver
from flashpatch.patches.cpu.gloo_transfer.errors import as_text, transfer_error

logger = logging.getLogger("flashpatch.cpu")


class Receiving:
    """Receive on a thread, one bucket ahead of what is being loaded."""

    def __init__(self, receiver: Receiver, group: GlooGroup) -> None:
        self._receiver, self._group = receiver, group
        self._joiner = Joiner()
        self._complete = False

    async def weights(self, step: int | None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield what is sent, if it is of this version; see `GlooCheckpointEngine.receive_weights`."""
        task = asyncio.current_task()
        if task is not None:
            task.add_done_callback(self._taken)
        pool = ThreadPoolExecutor(1, thread_name_prefix="flashpatch-gloo")
        try:
            await asyncio.wrap_future(pool.submit(self._begin, step))
            coming = pool.submit(self._next)
            while not isinstance(bucket := await asyncio.wrap_future(coming), dict):
                coming = pool.submit(self._next)
                for name, tensor in self._joiner.take(*bucket):
                    yield name, tensor
            self._check(bucket)
            self._complete = True
            self._receiver.say("received", number=self._joiner.contents.buckets)
        except Exception as error:
            self._receiver.fail(as_text(error))
            raise
        finally:
            if not self._complete:
                self._receiver.fail("the weights were not taken to their end")
            pool.shutdown(wait=False)

    def _taken(self, task: asyncio.Task[Any]) -> None:
        """Report the failure of the task that loads the weights: a generator sees nothing of it."""
        if self._complete:
            return
        error = None if task.cancelled() else task.exception()
        self._receiver.fail(as_text(error) if error else "loading ended before the last weight")

    def _begin(self, step: int | None) -> None:
        """Wait for the sender's version.

        Raises:
            PatchError: it is another one than this process is to get.
        """
        sent = self._receiver.expect("begin")["step"]
        self._receiver.version = f"version {sent}"
        if sent != step:
            raise transfer_error(
                f"rollout rank {self._receiver.rank} is to get version {step}, and the trainer sends version {sent}."
            )

    def _next(self) -> tuple[list[Piece], torch.Tensor] | dict[str, Any]:
        """Receive one bucket: its pieces, and ``(length,)`` uint8. After the last, what the sender counted.

        Raises:
            PatchError: it failed, or what arrived is not what was sent.
        """
        receiver, contents = self._receiver, self._joiner.contents
        receiver.say("ready", number=contents.buckets)
        message = receiver.expect("bucket", "end")
        if message["kind"] == "end":
            return message
        if message["number"] != contents.buckets:
            raise transfer_error(f"bucket {message['number']} came where {contents.buckets} was due.")
        data = torch.empty(message["length"], dtype=torch.uint8)
        self._group.start(data)
        self._group.finish(receiver.look, lambda: receiver.late("finish a broadcast"))
        found = checksum(data)
        if found != message["checksum"]:
            raise transfer_error(
                f"bucket {message['number']} of {receiver.version} reached rollout rank {receiver.rank} with the CRC-32 "
                f"{found:08x}, and was sent with {message['checksum']:08x}."
            )
        contents.buckets += 1
        return [Piece.of_json(values) for values in message["pieces"]], data

    def _check(self, message: dict[str, Any]) -> None:
        """Compare what arrived with what the sender counted.

        Raises:
            PatchError: they differ.
        """
        mine = self._joiner.contents.summary()
        sent = {name: message[name] for name in mine}
        if (unfinished := self._joiner.unfinished()) or mine != sent:
            raise transfer_error(
                f"rollout rank {self._receiver.rank} received {mine} of {self._receiver.version}, and {sent} was sent"
                + (f"; the end of {unfinished} is missing." if unfinished else ".")
            )
