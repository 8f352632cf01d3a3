"""Send weights from a trainer's processes to separate rollout processes through host memory and gloo.

Importing this module registers verl's checkpoint engine ``gloo``. It needs verl and torch, no accelerator, and no family
to be on: ``actor_rollout_ref.rollout.checkpoint_engine`` with ``backend=gloo`` and
``custom_backend_module=flashpatch.patches.cpu.checkpoint_engine``. With ``cpu`` on, a job that separates trainer and
rollouts gets both settings by itself.

One transfer, as verl's ``CheckpointEngineManager.update_weights`` calls it: ``prepare`` everywhere, ``build_topology``
in the driver, ``init_process_group`` everywhere, then ``send_weights`` on the trainer's ranks and ``receive_weights``
on the rollouts', ``finalize`` everywhere. Every transfer has a token, a store and a group of its own, so that a process
of an earlier one cannot join. A transfer that failed is cleared away by the next ``prepare``.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from flashpatch.errors import PatchError
from flashpatch.patches.cpu.gloo_transfer import control
from flashpatch.patches.cpu.gloo_transfer.broadcast import GlooGroup
from flashpatch.patches.cpu.gloo_transfer.buckets import Bucket, Contents, checksum, cut
from flashpatch.patches.cpu.gloo_transfer.errors import as_text, transfer_error
from flashpatch.patches.cpu.gloo_transfer.receiving import Receiving

logger = logging.getLogger("flashpatch.cpu")

BACKEND = "gloo"
"""verl's name of this engine."""


class GlooCheckpointEngine(CheckpointEngine):
    """Broadcast a trainer's weights to rollout processes through host memory, in buckets.

    Args:
        bucket_size: bytes of a bucket. The sender holds two, a receiver two and its largest tensor.
        is_master: whether this process is the trainer's rank 0, which sends.
        timeout_seconds: longest silence of a peer that is waited for: until processes have connected, the trainer
            has its next bucket, a rollout has loaded its last one. Processes that end are noticed at once.

    Attributes:
        rank: of this process in the transfer, -1 if it takes no part; None before `init_process_group`.

    Raises:
        ValueError: a size or time that is not positive.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_seconds: float = 60.0) -> None:
        if bucket_size <= 0 or timeout_seconds <= 0:
            raise ValueError(
                f"bucket_size={bucket_size} and timeout_seconds={timeout_seconds} must be positive"
            )
        self.bucket_size, self.is_master, self.timeout = bucket_size, is_master, float(timeout_seconds)
        self._sender: control.Sender | None = None
        self._receiver: control.Receiver | None = None
        self._group: GlooGroup | None = None
        self._store: dist.Store | None = None
        self.rank: int | None = None

    def prepare(self) -> dict[str, Any]:
        """Clear away what a failed transfer left, and open a new one.

        Returns:
            What this process is; on the master also how to join.
        """
        self.finalize()
        mine = {"process": control.myself()}
        if not self.is_master:
            return mine
        host = ray.util.get_node_ip_address().strip("[]")
        self._sender = control.Sender(host, self.timeout)
        self._store = self._open_store(host, 0, master=True)
        join = {
            "host": host,
            "port": self._sender.port,
            "token": self._sender.token,
            "store": self._store.port,
            "group": f"flashpatch-{secrets.token_hex(8)}",
        }
        return {**mine, "join": join}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give the trainer's rank 0 rank 0, its other ranks -1, rollout processes 1 and up.

        Raises:
            PatchError: the first process is no master.
        """
        join = metadata[0].get("join")
        if join is None:
            raise transfer_error(
                "the first process of the trainer is not its master.", "Report this as a bug."
            )
        receivers = range(1, rollout_world_size + 1)
        peers = {rank: metadata[actor_wg_world_size + rank - 1]["process"] for rank in receivers}

        def same(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "join": [join] * len(ranks), "peers": [peers] * len(ranks)}

        return same([0] + [-1] * (actor_wg_world_size - 1)), same(list(receivers))

    def init_process_group(self, rank: int, join: dict[str, Any], peers: dict[int, str]) -> None:
        """Connect this process with the others of the transfer; nothing to do for rank -1.

        Raises:
            PatchError: a process did not come, or belongs to another transfer.
        """
        self.rank = rank
        if rank < 0 or not peers:
            return
        try:
            self._join(rank, join, peers)
        except BaseException as error:
            if self._sender is not None:
                self._sender.fail(as_text(error))
            raise

    def _join(self, rank: int, join: dict[str, Any], peers: dict[int, str]) -> None:
        if rank == 0:
            self._sender.accept(peers.keys(), peers)
            address = join["host"]
        else:
            self._receiver = control.Receiver(join["host"], join["port"], join["token"], rank, self.timeout)
            address = self._receiver.address
            self._store = self._open_store(join["host"], join["store"], master=False)
        try:
            self._group = GlooGroup(self._store, join["group"], rank, len(peers) + 1, address, self.timeout)
        except PatchError:
            (self._sender or self._receiver).look(0.0)  # a peer that ended is the reason
            raise

    def finalize(self) -> None:
        """Close connections, group and store."""
        for part in (self._sender, self._receiver, self._group):
            if part is not None:
                part.close()
        self._sender = self._receiver = self._group = self._store = self.rank = None

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
            PatchError: a rollout process failed, ended or kept silent; the others are told.
        """
        weights = ensure_async_iterator(weights)
        try:
            if self.rank is None:
                raise transfer_error(
                    "weights are to be sent before init_process_group.", "Report this as a bug."
                )
            return await self._send(weights, global_steps) if self.rank == 0 and self._group else {}
        except BaseException as error:
            if self._sender is not None:
                self._sender.fail(as_text(error))
            raise
        finally:
            async for _ in weights:
                pass

    async def _send(self, weights: Any, step: int | None) -> dict[str, float]:
        sender, began = self._sender, time.perf_counter()
        sender.version = f"version {step}"
        sender.tell("begin", step=step)
        contents = Contents()
        bucket, spare = Bucket(self.bucket_size), Bucket(self.bucket_size)
        async for name, tensor in weights:
            for piece, data in cut(name, tensor, self.bucket_size):
                if not bucket.add(piece, data):
                    self._start(bucket, contents)
                    bucket, spare = spare, bucket
                    bucket.clear()
                    bucket.add(piece, data)
            contents.add(piece.name, piece.shape, piece.dtype, piece.nbytes)
        if bucket.pieces:
            self._start(bucket, contents)
        self._finish(contents)
        sender.expect("ready", contents.buckets)
        sender.tell("end", **contents.summary())
        sender.expect("received", contents.buckets)
        seconds = time.perf_counter() - began
        logger.info("sent %s: %s in %.3f s", sender.version, contents.summary(), seconds)
        numbers = {"bytes": contents.bytes, "seconds": seconds, "buckets": contents.buckets}
        return {f"gloo/{name}": float(value) for name, value in numbers.items()}

    def _start(self, bucket: Bucket, contents: Contents) -> None:
        """Finish the bucket before, and start to send this one once all receivers have room for it."""
        sender, number = self._sender, contents.buckets
        self._finish(contents)
        sender.expect("ready", number)
        data = bucket.data
        pieces = [piece.as_json() for piece in bucket.pieces]
        sender.tell("bucket", number=number, length=data.numel(), checksum=checksum(data), pieces=pieces)
        self._group.start(data)
        contents.buckets += 1

    def _finish(self, contents: Contents) -> None:
        """Wait for the broadcast under way."""
        self._group.finish(self._sender.look, lambda: self._sender.late("ready", contents.buckets))

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
                what was sent.
        """
        if self._receiver is None or self._group is None:
            raise transfer_error(
                "weights are to be received before init_process_group.", "Report this as a bug."
            )
        return Receiving(self._receiver, self._group).weights(global_steps)

    def _open_store(self, host: str, port: int, master: bool) -> dist.TCPStore:
        wait = timedelta(seconds=self.timeout)
        try:
            return dist.TCPStore(host, port, None, master, timeout=wait, wait_for_workers=False)
        except (RuntimeError, dist.DistStoreError) as error:
            what = "open" if master else "reach"
            raise transfer_error(
                f"{control.myself()} cannot {what} the store at {host}:{port}: {error}."
            ) from error


if BACKEND not in CheckpointEngineRegistry._registry:  # one of verl's own stays
    CheckpointEngineRegistry.register(BACKEND)(GlooCheckpointEngine)
