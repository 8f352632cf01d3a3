"""verl's own manager and workers under Ray with the checkpoint engine gloo, over several syncs with faults.

Real are `CheckpointEngineManager`, `CheckpointEngineWorker` and `ActorRolloutRefWorker`'s methods; the training engine
and the rollout server's adapter are stand-ins that give and take tensors. Prints one JSON object: name of the sync to
``{"error": ..., "held": {rank: sum of what each rollout got}}``.
"""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace
from typing import Any

import ray
import ray_start
import torch
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import CheckpointEngineConfig
from verl.workers.engine_workers import ActorRolloutRefWorker

MODULE = "flashpatch.patches.cpu.checkpoint_engine"
ENGINE = CheckpointEngineConfig(
    backend="gloo",
    update_weights_bucket_megabytes=1,
    custom_backend_module=MODULE,
    engine_kwargs={"gloo": {"timeout_seconds": 600}},  # whoever waits for it makes the test hang
)
RAISES, DIES = 2, 4  # syncs


class Trainer(Worker):
    """A training rank whose engine exports tensors filled with the number of the sync."""

    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine
    update_weights = ActorRolloutRefWorker.update_weights

    def __init__(self) -> None:
        super().__init__()
        import flashpatch.patches.cpu.checkpoint_engine  # noqa: F401

        initialize_global_process_group_ray()
        self.exports = 0
        self.config = SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=ENGINE))
        self.actor = SimpleNamespace(engine=SimpleNamespace(get_per_tensor_param=self.export))
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "gloo", bucket_size=1 << 20, is_master=self.rank == 0, **ENGINE.engine_kwargs["gloo"]
        )

    def export(self) -> tuple[Any, None]:
        self.exports += 1
        return ((f"w{i}", torch.full((100_000,), float(self.exports))) for i in range(10)), None


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


class Replica:
    """What verl's manager uses of a replica."""

    def __init__(self, faulty: bool) -> None:
        init = RayClassWithInitArgs(
            ray.remote(CheckpointEngineWorker),
            rollout_config=SimpleNamespace(checkpoint_engine=ENGINE, name="vllm"),
            model_config=None,
            server_adapter=Adapter(faulty),
        )
        self.workers = group(init, f"replica{int(faulty)}").workers

    def held(self) -> float:
        return ray.get([w.__ray_call__.remote(lambda self: self.server_adapter.held) for w in self.workers])[
            0
        ]

    async def nothing(self, **kwargs: Any) -> None:
        return None

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


def group(init: RayClassWithInitArgs, name: str) -> RayWorkerGroup:
    pool = RayResourcePool([1], use_gpu=False, name_prefix=name, max_colocate_count=1)
    return RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=init, name_prefix=name, use_gpu=False, device_name="cpu"
    )


def main() -> None:
    ray_start.ask_again()
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100_000_000)
    replicas = [Replica(False), Replica(True)]
    manager = CheckpointEngineManager(
        ENGINE, group(RayClassWithInitArgs(ray.remote(Trainer)), "trainer"), list(replicas)
    )
    found = {}
    for step in range(1, DIES + 2):
        error = None
        try:
            manager.update_weights(global_steps=step)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        if step == DIES:
            manager.remove_replicas(replicas[1:])
        held = [replica.held() for replica in manager.replicas]
        found[step] = {"error": error, "held": held}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
