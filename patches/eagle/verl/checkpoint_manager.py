"""Train and send drafters from verl's driver: train when rollouts end, send before the next ones begin."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from flashpatch import ledger
from flashpatch.arming.site import Site
from flashpatch.patches._shared.awaits import caller_awaits, resolve
from flashpatch.patches.eagle.verl import verl_config
from flashpatch.patches.eagle.verl.cotraining import Job
from flashpatch.patches.eagle.verl.targets import DriverPatch
from flashpatch.patches.eagle.verl_sglang import http_server as verl_sglang
from flashpatch.patches.eagle.verl_vllm import http_server as verl_vllm
from flashpatch.record import Contract

MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"
_RPC_SECONDS = 600.0  # for a call to the replicas
_SERVERS = {"vllm": verl_vllm, "sglang": verl_sglang}
_metrics: dict[str, float] = {}  # of the last pause, until they are logged
_job: Job | None = None


def on_sleep(original, self, *args: Any, **kwargs: Any) -> Any:
    """Around ``sleep_replicas``, which verl calls when a step's rollouts are complete: train in the pause."""

    async def awaited() -> Any:
        result = await original(self, *args, **kwargs)
        await asyncio.to_thread(_rollouts_ended)
        return result

    if caller_awaits():
        return awaited()
    result = original(self, *args, **kwargs)
    _rollouts_ended()
    return result


def on_update(original, self, global_steps: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Around ``update_weights``, after which rollouts go on: send the newest drafter."""

    async def awaited() -> Any:
        result = await resolve(original(self, global_steps, *args, **kwargs))
        await asyncio.to_thread(_policy_updated, self, global_steps)
        return result

    if caller_awaits():
        return awaited()
    result = original(self, global_steps, *args, **kwargs)
    _policy_updated(self, global_steps)
    return result


def on_log(original, self, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Tracking.log``: add the metrics of the last pause to verl's."""
    data = {**data, **_metrics}
    _metrics.clear()
    return original(self, data, *args, **kwargs)


def _rollouts_ended() -> None:
    if _job is not None:
        _job.rollouts_ended()


def _policy_updated(manager: Any, step: int | None) -> None:
    global _job
    if _job is None:
        settings = verl_config.settings(manager.replicas[0].config) if manager.replicas else None
        if settings is None:
            return
        ledger.role("driver")
        _job = Job(**settings)
    started = time.monotonic()

    def call(method: str, arguments: tuple) -> list[Any]:
        import ray

        start = _SERVERS[_job.settings["engine"]].start_call
        calls = [start(replica.server_handle, method, arguments) for replica in manager.replicas]
        return ray.get(calls, timeout=_RPC_SECONDS)

    _job.policy_updated(call, step)
    _metrics.update(_job.metrics)
    _metrics["timing_s/eagle"] = time.monotonic() - started


def _undo(site: Site) -> None:
    global _job
    if _job is not None:
        _job.close()
        _job = None
    site.unwrap()


IDLE = DriverPatch(
    id="eagle.verl.sleep_replicas",
    targets=(f"{MANAGER}.sleep_replicas",),
    wrapper=on_sleep,
    contract=Contract(mentions=("self.replicas",)),
    evidence="optional",  # only one of a job's drivers has it
    needs=("eagle.verl.update_weights",),
    why="A drafter can be trained at no cost to the rollouts only while they rest.",
    how="Starts a slice of drafter training, which ends with the next weight update.",
)

UPDATE = DriverPatch(
    id="eagle.verl.update_weights",
    targets=(f"{MANAGER}.update_weights",),
    wrapper=on_update,
    undo=_undo,
    contract=Contract(
        params=("global_steps",),
        mentions=("self.replicas",),
        exists=(
            "verl.utils.ray_utils:auto_await",
            "verl.workers.rollout.replica:RolloutReplica.server_handle",
        ),
    ),
    evidence="update",
    when="anywhere=eagle.verl.validate_config",
    needs=("eagle.verl.validate_config",),
    why="A drafter falls behind a policy in training, and verl sends the replicas nothing but the policy.",
    how="After each update of the policy sends every replica the newest drafter, and the trainer the policy's "
    "embeddings and head.",
)

LOG = DriverPatch(
    id="eagle.verl.tracking_log",
    targets=("verl.utils.tracking:Tracking.log",),
    wrapper=on_log,
    contract=Contract(params=("data", "step")),
    evidence="optional",
    needs=("eagle.verl.update_weights",),
    why="verl does not log what a drafter of its own training does.",
    how="Adds eagle/* to what the trainer logs next.",
)
