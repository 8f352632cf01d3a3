"""Parts of verl's sync to separate rollouts under Ray, real but for the training engine and the rollout's server.

Real are `CheckpointEngineManager`, `CheckpointEngineWorker` and `ActorRolloutRefWorker`'s methods, with the checkpoint engine
gloo; what exports weights and what takes them are stand-ins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import CheckpointEngineConfig
from verl.workers.engine_workers import ActorRolloutRefWorker

ENGINE = CheckpointEngineConfig(
    backend="gloo",
    update_weights_bucket_megabytes=1,
    custom_backend_module="flashpatch.patches.cpu.checkpoint_engine",
    engine_kwargs={"gloo": {"timeout_seconds": 600}},  # whoever waits for it makes the test hang
)


class Trainer(Worker):
    """A training rank; a subclass says in ``exported`` what it exports the how-manyeth time."""

    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine
    update_weights = ActorRolloutRefWorker.update_weights

    def __init__(self) -> None:
        super().__init__()
        import flashpatch.patches.cpu.checkpoint_engine  # noqa: F401

        initialize_global_process_group_ray()
        self.exports = 0
        self.config = SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=ENGINE), model={})
        self.actor = SimpleNamespace(engine=SimpleNamespace(get_per_tensor_param=self.export))
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "gloo", bucket_size=1 << 20, is_master=self.rank == 0, **ENGINE.engine_kwargs["gloo"]
        )

    def export(self) -> tuple[Any, None]:
        self.exports += 1
        return iter(self.exported(self.exports)), None


class Replica:
    """What verl's manager uses of a replica.

    Args:
        adapter: stands for its rollout's server.
    """

    def __init__(self, adapter: Any) -> None:
        init = RayClassWithInitArgs(
            ray.remote(CheckpointEngineWorker),
            rollout_config=SimpleNamespace(checkpoint_engine=ENGINE, name="vllm"),
            model_config={},
            server_adapter=adapter,
        )
        self.workers = group(init, f"replica{adapter.replica_rank}").workers

    def call(self, function: Any) -> Any:
        """What a function of the worker returns there."""
        return ray.get(self.workers[0].__ray_call__.remote(function))

    async def nothing(self, **kwargs: Any) -> None:
        return None

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


def group(init: RayClassWithInitArgs, name: str, size: int = 1) -> RayWorkerGroup:
    """Start workers of verl."""
    pool = RayResourcePool([size], use_gpu=False, name_prefix=name, max_colocate_count=1)
    return RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=init, name_prefix=name, use_gpu=False, device_name="cpu"
    )
