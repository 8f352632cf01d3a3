"""verl's own manager and workers under Ray with the checkpoint engine gloo, sending differences, over syncs with faults.

Real are `CheckpointEngineManager`, `CheckpointEngineWorker` and `ActorRolloutRefWorker`'s methods; the training engine
and the rollout server's adapter are stand-ins that give and take tensors. Prints one JSON object: name of the sync to
``{"error", "share": bytes on the wire over all bytes, "right": whether each rollout got the trainer's bytes, "loads": how
often each has loaded}``.
"""

from __future__ import annotations

import hashlib
import json
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

import flashpatch

ENGINE = CheckpointEngineConfig(
    backend="gloo",
    update_weights_bucket_megabytes=1,
    custom_backend_module="flashpatch.patches.cpu.checkpoint_engine",
    engine_kwargs={"gloo": {"timeout_seconds": 600}},  # whoever waits for it makes the test hang
)


def exported(number: int) -> list[tuple[str, Any]]:
    """The trainer's weights at its export of this number: each changes one value in a hundred of those before."""
    found = []
    for i in range(8):
        tensor = torch.randn(300, 501, generator=torch.Generator().manual_seed(i)).bfloat16()
        for step in range(1, number):
            chosen = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(step * 100 + i)) < 0.01
            tensor[chosen] += 1
        found.append((f"w{i}", tensor))
    return found


class Digest:
    """Digest of names, dtypes, shapes and bytes, in order."""

    def __init__(self) -> None:
        self._sum = hashlib.sha256()

    def add(self, name: str, tensor: Any) -> None:
        self._sum.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        self._sum.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def text(self) -> str:
        return self._sum.hexdigest()


class Trainer(Worker):
    """A training rank."""

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
        return iter(exported(self.exports)), None


class Adapter:
    """Stands for a rollout server."""

    def __init__(self, rank: int) -> None:
        self.replica_rank, self.is_leader_rank = rank, True
        self.held, self.loads, self.faulty = "", 0, False

    async def update_weights(self, weights: Any, global_steps: int, wire_format: str) -> None:
        held = Digest()
        self.loads += 1
        async for name, tensor in weights:
            if self.faulty and name == "w5":
                self.faulty = False
                raise LookupError("cannot place this tensor")
            held.add(name, tensor)
        self.held = held.text()


class Replica:
    """What verl's manager uses of a replica."""

    def __init__(self, rank: int) -> None:
        init = RayClassWithInitArgs(
            ray.remote(CheckpointEngineWorker),
            rollout_config=SimpleNamespace(checkpoint_engine=ENGINE, name="vllm"),
            model_config={},
            server_adapter=Adapter(rank),
        )
        self.workers = group(init, f"replica{rank}", 1).workers

    def call(self, function: Any) -> Any:
        """What a function of the worker returns there."""
        return ray.get(self.workers[0].__ray_call__.remote(function))

    async def nothing(self, **kwargs: Any) -> None:
        return None

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


def group(init: RayClassWithInitArgs, name: str, size: int) -> RayWorkerGroup:
    pool = RayResourcePool([size], use_gpu=False, name_prefix=name, max_colocate_count=1)
    return RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=init, name_prefix=name, use_gpu=False, device_name="cpu"
    )


def forgets(worker: Any) -> None:
    """As a process that was started again."""
    from flashpatch.patches.fp8.verl.delta_sync import ENDS

    ENDS.receiver.forget()


def flips(worker: Any) -> None:
    """One bit of host memory."""
    from flashpatch.patches.fp8.verl.delta_sync import ENDS

    ENDS.receiver._copies["w3"].view(torch.int16)[7, 7] ^= 1


def earlier(worker: Any) -> None:
    """As a rollout that a sync before has passed by."""
    from flashpatch.patches.fp8.verl.delta_sync import ENDS

    ENDS.receiver.version = "an earlier one"


def fails(worker: Any) -> None:
    worker.server_adapter.faulty = True


def believed(manager: CheckpointEngineManager) -> None:
    """The driver asks one rollout only, as if the other had changed since."""
    from flashpatch.patches.fp8.verl import delta_versions

    rollouts = delta_versions._rollouts

    def first(asked: Any) -> list[Any]:
        delta_versions._rollouts = rollouts
        return rollouts(asked)[:1]

    delta_versions._rollouts = first


class Lab:
    """Trainer, manager and two rollouts; another one may join."""

    def __init__(self) -> None:
        self.trainer = group(RayClassWithInitArgs(ray.remote(Trainer)), "trainer", 2)
        self.manager = CheckpointEngineManager(ENGINE, self.trainer, [Replica(0), Replica(1)])
        self.found: dict[str, Any] = {}

    def sync(self, name: str, fault: Any = None, *also: Any) -> None:
        """Sync once, after the second rollout has been given a fault."""
        if fault is not None:
            self.manager.replicas[1].call(fault)
        for one in also:
            one(self.manager)
        error, metrics = None, {}
        try:
            metrics = self.manager.update_weights(global_steps=len(self.found) + 1)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        (exports, _) = ray.get(
            [w.__ray_call__.remote(lambda self: self.exports) for w in self.trainer.workers]
        )
        right = Digest()
        for item in exported(exports):
            right.add(*item)
        held = [
            r.call(lambda w: (w.server_adapter.held, w.server_adapter.loads)) for r in self.manager.replicas
        ]
        self.found[name] = {
            "error": error,
            "share": metrics.get("sync/wire_share"),
            "changed": metrics.get("sync/changed_share"),
            "gloo": metrics.get("gloo/bytes"),
            "right": [digest == right.text() for digest, _ in held],
            "loads": [loads for _, loads in held],
        }


def main() -> None:
    ray_start.ask_again()
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100_000_000)
    lab = Lab()
    flashpatch.disable("bf16")  # in the driver; without its plan the trainer sends as verl does
    lab.sync("stock")
    lab.sync("stock again")
    flashpatch.enable("bf16", delta_sync=True)
    lab.sync("first")
    lab.sync("second")
    lab.sync("restarted", forgets)
    lab.sync("third")
    lab.sync("passed by", earlier)
    lab.sync("flipped", flips)
    lab.sync("fourth")
    lab.sync("changed since", forgets, believed)
    lab.sync("failed", fails)
    lab.sync("after it")
    lab.sync("joined", None, lambda manager: manager.add_replicas([Replica(2)]))
    lab.sync("last")
    print(json.dumps(lab.found))


if __name__ == "__main__":
    main()
