"""verl's own manager and workers under Ray with the checkpoint engine gloo (`sync_lab`), sending differences, over syncs with faults.

Prints one JSON object: name of the sync to
``{"error", "share": bytes on the wire over all bytes, "right": whether each rollout got the trainer's bytes, "loads": how
often each has loaded}``.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import ray
import ray_start
import sync_lab
import torch
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs

import flashpatch


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


class Trainer(sync_lab.Trainer):
    """A training rank."""

    exported = staticmethod(exported)


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


def replica(rank: int) -> sync_lab.Replica:
    return sync_lab.Replica(Adapter(rank))


def forgets(worker: Any) -> None:
    """As a process that was started again."""
    from flashpatch.patches.fp8.verl.delta_sync import STATE

    STATE.receiver.forget()


def flips(worker: Any) -> None:
    """One bit of host memory."""
    from flashpatch.patches.fp8.verl.delta_sync import STATE

    STATE.receiver._copies["w3"].view(torch.int16)[7, 7] ^= 1


def earlier(worker: Any) -> None:
    """As a rollout that a sync before has passed by."""
    from flashpatch.patches.fp8.verl.delta_sync import STATE

    STATE.receiver.version = "an earlier one"


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
        self.trainer = sync_lab.group(RayClassWithInitArgs(ray.remote(Trainer)), "trainer", 2)
        self.manager = CheckpointEngineManager(sync_lab.ENGINE, self.trainer, [replica(0), replica(1)])
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
    lab.sync("joined", None, lambda manager: manager.add_replicas([replica(2)]))
    lab.sync("last")
    print(json.dumps(lab.found))


if __name__ == "__main__":
    main()
