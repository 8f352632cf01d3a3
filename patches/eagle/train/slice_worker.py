"""Train in slices, alone or on several ranks, with nothing on the device in between."""

from __future__ import annotations

import contextlib
import datetime
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flashpatch.patches.eagle.train.pack import Pack
from flashpatch.patches.eagle.train.trainer import Trainer
from flashpatch.patches.eagle.train.worker import Worker

MEETING_SECONDS = 20.0  # for all ranks of a slice to arrive
STEP_SECONDS = 60.0  # that a rank waits for the others of its slice
CPU = torch.device("cpu")


class SliceWorker(Worker):
    """Train in slices on a device that is another's in between.

    Each slice begins from the last checkpoint and ends with one, so it may have other ranks than the one before;
    ``folder`` must be one that all of them see. Its command ``train`` takes ``group``: ``address`` and ``port`` of the
    ranks' meeting, ``rank`` and ``ranks``; without it the slice has one rank. On several, the drafter is sharded by
    FSDP2, each rank learns from the samples of its own buffer, and all of them stop when one is told to.
    """

    def _prepare(self) -> None:
        """Leave the device alone until a slice begins."""
        self._mesh: DeviceMesh | None = None

    def _execute(self, command: Mapping[str, Any]) -> None:
        if command["command"] == "train":
            try:
                with _ranks(command.get("group"), self.device) as self._mesh:
                    self.checkpoints.join_ranks()
                    self._train_slice(float(command["seconds"]), command.get("steps"))
            finally:
                self._mesh = None
                self.checkpoints.join_ranks()
        elif command["command"] == "load":
            self._load(self._open_trainer(CPU), command["folder"])
            self.checkpoints.settle()
        elif command["command"] == "target":
            self._target = command["folder"]
        elif command["command"] == "keep":
            self._good = set(command["folders"])

    def _train_slice(self, seconds: float, steps: int | None) -> None:
        trainer: Trainer | None = self._open_trainer(self.device, self._mesh)
        found = self._train(trainer, seconds, steps)
        if found:
            self.checkpoints.save(trainer)  # copied to the host here, written beside what follows
            weights = trainer.weights()
        trainer = None
        self._rest()
        self._report({"event": "released"})
        if found:
            self.checkpoints.settle()
            if self._mesh is None or self._mesh.get_rank() == 0:
                self._write(weights, self._load_target(CPU), found)

    def _rest(self) -> None:
        """Give the device's memory back."""
        gc.collect()  # a module and its hooks refer to each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_over(self, bounded: bool) -> bool:
        """Return whether any rank's slice ends before its next step."""
        over = super()._is_over(bounded)
        if self._mesh is None:
            return over
        votes = torch.tensor(float(over))
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes)

    def _step(self, trainer: Trainer, rows: list[Pack]) -> dict[str, float]:
        """Make a step with all ranks, of which some may have nothing to learn from."""
        if self._mesh is None:
            return super()._step(trainer, rows)
        found = trainer.step(rows)
        return found if found["positions"] else {}


@contextlib.contextmanager
def _ranks(group: Mapping[str, Any] | None, device: torch.device) -> Iterator[DeviceMesh | None]:
    """Meet the other ranks of a slice; yield a mesh of them, or None without ``group``."""
    if not group:
        yield None
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, ranks = int(group["rank"]), int(group["ranks"])
    meeting, step = (datetime.timedelta(seconds=seconds) for seconds in (MEETING_SECONDS, STEP_SECONDS))
    store = dist.TCPStore(group["address"], int(group["port"]), ranks, is_master=rank == 0, timeout=meeting)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=step)
    try:
        yield init_device_mesh(device.type, (ranks,))
    finally:
        dist.destroy_process_group()
