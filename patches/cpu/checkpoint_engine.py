"""Send weights from a trainer's processes to separate rollout processes through Ray's object store.

Importing this module registers verl's checkpoint engine ``gloo``, a name that is older than its way. It needs verl and
torch, no accelerator, and no family to be on: ``actor_rollout_ref.rollout.checkpoint_engine`` with ``backend=gloo`` and
``custom_backend_module=flashpatch.patches.cpu.checkpoint_engine``. With ``cpu`` on, a job that separates trainer and
rollouts gets both settings by itself.

One transfer, as verl's ``CheckpointEngineManager.update_weights`` calls it: ``prepare`` everywhere, ``build_topology``
in the driver, ``init_process_group`` everywhere, then ``send_weights`` on the trainer's ranks and ``receive_weights``
on the rollouts', ``finalize`` everywhere. Transfers are numbered, so that a process of an earlier one cannot take part.
One that failed is ended by the next ``prepare``."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from flashpatch.patches.cpu import exchange
from flashpatch.patches.cpu.buckets import Contents, Joiner, Piece, cut
from flashpatch.patches.cpu.exchange import Line, transfer_error

logger = logging.getLogger("flashpatch.cpu")

BACKEND = "gloo"
"""verl's name of this engine."""
_MOST = 128 << 20  # bytes of a bucket, as the object store holds three; verl's default is 2 GB
_BUG = "Report this as a bug."


class ObjectStoreEngine(CheckpointEngine):
    """Pass a trainer's weights to rollout processes through Ray's object store, in buckets.

    Args:
        bucket_size: bytes of a bucket, 128 MB at most. The sender holds one, the object store three, a rollout its
            largest tensor.
        is_master: whether this process is the trainer's rank 0, which sends.
        timeout_seconds: longest silence of a process that is waited for: until the trainer has its next bucket, a
            rollout has loaded its last one. Processes that end are noticed at once.

    Attributes:
        rank: of this process in the transfer, -1 if it takes no part; None before `init_process_group`.

    Raises:
        ValueError: a size or time that is not positive."""

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_seconds: float = 60.0) -> None:
        if bucket_size <= 0 or timeout_seconds <= 0:
            raise ValueError(
                f"bucket_size={bucket_size} and timeout_seconds={timeout_seconds} must be positive"
            )
        self.bucket_size, self.is_master = min(bucket_size, _MOST), is_master
        self.timeout = float(timeout_seconds)
        self._exchange: Any = None
        self._name, self._transfer = "", 0
        self._line: Line | None = None
        self.rank: int | None = None

    def prepare(self) -> dict[str, Any]:
        """Begin a transfer, whatever the last one left behind; return what this process is, on the master also how to
        join."""
        if self._line is not None:  # the last transfer failed, its actor may have ended
            self._exchange = None
        self.finalize()
        mine = {"process": exchange.myself()}
        if not self.is_master:
            return mine
        if self._exchange is None:
            self._name = f"flashpatch-weights-{secrets.token_hex(8)}"
            self._exchange = exchange.opened(self._name, self.timeout)
        self._transfer += 1
        return {**mine, "join": {"exchange": self._name, "transfer": self._transfer}}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give the trainer's rank 0 rank 0, its other ranks -1, rollout processes 1 and up. Raises PatchError if the
        first process is no master."""
        join = metadata[0].get("join")
        if join is None:
            raise transfer_error("the first process of the trainer is not its master.", _BUG)
        receivers = range(1, rollout_world_size + 1)
        peers = {rank: metadata[actor_wg_world_size + rank - 1]["process"] for rank in receivers}

        def same(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "join": [join] * len(ranks), "peers": [peers] * len(ranks)}

        return same([0] + [-1] * (actor_wg_world_size - 1)), same(list(receivers))

    def init_process_group(self, rank: int, join: dict[str, Any], peers: dict[int, str]) -> None:
        """Take part in the transfer; nothing to do for rank -1. Raises PatchError if the trainer cannot be reached."""
        self.rank = rank
        if rank < 0 or not peers:
            return
        actor = self._exchange if rank == 0 else exchange.found(join["exchange"], rank)
        self._line = Line(actor, join["transfer"], peers, rank, self.timeout)

    def finalize(self) -> None:
        """Leave the transfer."""
        self._line = self.rank = None

    @torch.no_grad()
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Send all weights; every rank of the trainer takes them from the generator, and rank 0 sends.

        The generator's gathers are collective, so rank 0 empties it also after a failure.

        Args:
            weights: names and tensors of any dtype and device, a generator or an asynchronous one.
            global_steps: version of the weights.

        Returns:
            On rank 0 ``gloo/bytes``, ``gloo/seconds`` and ``gloo/buckets``, which verl logs.

        Raises:
            PatchError: a rollout process failed, ended or kept silent; the others are told."""
        weights, line = ensure_async_iterator(weights), self._line
        try:
            if self.rank is None:
                raise transfer_error("weights are to be sent before init_process_group.", _BUG)
            return await self._send(line, weights, global_steps) if line else {}
        except BaseException as error:
            if line:
                line.fail(error)
            raise
        finally:
            async for _ in weights:
                pass

    async def _send(self, line: Line, weights: Any, step: int | None) -> dict[str, float]:
        began, contents = time.perf_counter(), Contents()
        bucket: list[Piece] = []
        size = 0
        line.version = f"version {step}"
        async for name, tensor in weights:
            for piece in cut(name, tensor, self.bucket_size):
                if bucket and size + piece.data.size > self.bucket_size:
                    await _pass_on(line, bucket, contents, step)
                    bucket, size = [], 0
                bucket.append(piece)
                size += piece.data.size
                contents.add(piece)
        if bucket:
            await _pass_on(line, bucket, contents, step)
            bucket = []
        await line.offer(contents.buckets, step, vars(contents))
        await line.offer(contents.buckets + 1, step, None)
        await line.settle()
        seconds = time.perf_counter() - began
        logger.info("sent %s: %s in %.3f s", line.version, vars(contents), seconds)
        numbers = {"bytes": contents.bytes, "seconds": seconds, "buckets": contents.buckets}
        return {f"gloo/{name}": float(value) for name, value in numbers.items()}

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the weights of one transfer.

        An error while they are taken reaches the sender too: of this generator, and of the task that takes from it.

        Args:
            global_steps: version that this process is to get.

        Yields:
            Name and tensor on the CPU, in the order and dtype in which they were sent. A tensor's memory is not
            used again.

        Raises:
            PatchError: the sender failed, ended or kept silent, sends another version, or what arrived is not
                what was sent."""
        if self._line is None:
            raise transfer_error("weights are to be received before init_process_group.", _BUG)
        return Receiving(self._line).weights(global_steps)


async def _pass_on(line: Line, bucket: list[Piece], contents: Contents, step: int | None) -> None:
    await line.offer(contents.buckets, step, [ray.put(bucket)])
    contents.buckets += 1


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
                for name, tensor in self._joiner.take(bucket):
                    yield name, tensor
                del bucket  # its memory in the object store, before the next one arrives
            self._check(bucket)
            self._complete = True
            self._line.ask("take", self._line.rank, self._joiner.contents.buckets + 1)
        except Exception as error:
            self._line.fail(error)
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
        self._line.fail(error or "loading ended before the last weight")

    def _ask(self, step: int | None) -> asyncio.Task[Any]:
        """Ask for the next bucket at once, and fetch it while the one before is loaded."""
        asked = self._line.ask("take", self._line.rank, self._joiner.contents.buckets)
        coming = asyncio.create_task(self._fetched(asked, step))
        # also if it is never awaited
        coming.add_done_callback(lambda task: task.cancelled() or task.exception())
        return coming

    async def _fetched(self, asked: Any, step: int | None) -> Any:
        """Return a bucket, a list of pieces; after the last, what the sender counted. Raises `PatchError` if it does not come."""
        sent, item = await self._line.answer(asked)
        if sent != step:
            raise transfer_error(
                f"rollout rank {self._line.rank} is to get version {step}, and the trainer sends version {sent}."
            )
        return await self._line.answer(item[0]) if isinstance(item, list) else item

    def _check(self, sent: dict[str, Any]) -> None:
        """Raise `PatchError` if what arrived is not what the sender counted."""
        mine = vars(self._joiner.contents)
        if mine != sent:
            raise transfer_error(
                f"rollout rank {self._line.rank} received {mine} of {self._line.version}, and {sent} was sent."
            )


if BACKEND not in CheckpointEngineRegistry._registry:  # one of verl's own stays
    CheckpointEngineRegistry.register(BACKEND)(ObjectStoreEngine)
