"""verl's own manager and workers under Ray with the checkpoint engine gloo (`sync_lab`), over several syncs with faults.

Prints one JSON object: name of the sync to ``{"error": ..., "held": {rank: sum of what each rollout got}}``.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import ray
import ray_start
import sync_lab
import torch
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs

RAISES, DIES = 2, 4  # syncs


class Trainer(sync_lab.Trainer):
    """A training rank whose engine exports tensors filled with the number of the sync."""

    def exported(self, number: int) -> Any:
        return ((f"w{i}", torch.full((100_000,), float(number))) for i in range(10))


class Adapter:
    """Stands for a rollout server: the second replica raises in one sync, and dies in another."""

    def __init__(self, faulty: bool) -> None:
        self.faulty, self.held, self.replica_rank, self.is_leader_rank = faulty, 0.0, int(faulty), True

    async def update_weights(self, weights: Any, global_steps: int, wire_format: str) -> None:
        held = 0.0
        async for name, tensor in weights:
            if self.faulty and name == "w5" and global_steps == RAISES:
                raise LookupError("cannot place this tensor")
            if self.faulty and name == "w5" and global_steps == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            held += float(tensor.sum())
        self.held = held


def main() -> None:
    ray_start.ask_again()
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100_000_000)
    replicas = [sync_lab.Replica(Adapter(False)), sync_lab.Replica(Adapter(True))]
    trainer = sync_lab.group(RayClassWithInitArgs(ray.remote(Trainer)), "trainer")
    manager = CheckpointEngineManager(sync_lab.ENGINE, trainer, list(replicas))
    found = {}
    for step in range(1, DIES + 2):
        error = None
        try:
            manager.update_weights(global_steps=step)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        if step == DIES:
            manager.remove_replicas(replicas[1:])
        held = [replica.call(lambda worker: worker.server_adapter.held) for replica in manager.replicas]
        found[step] = {"error": error, "held": held}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
