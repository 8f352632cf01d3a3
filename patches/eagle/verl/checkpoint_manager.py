"""The driver: where rollouts end and where the next ones are about to begin."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import Any

from flashpatch import ledger
from flashpatch.arming.site import Site
from flashpatch.patches._shared.awaits import caller_awaits
from flashpatch.patches.eagle.verl import verl_config
from flashpatch.patches.eagle.verl.cotraining import Job
from flashpatch.patches.eagle.verl.targets import DriverPatch
from flashpatch.record import Contract

MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"
_LIMIT = 600.0  # seconds for a call to the replicas
_pending: dict[str, float] = {}  # metrics of the last pause, until they are logged
_job: Job | None = None


def on_sleep(original, self, *args: Any, **kwargs: Any) -> Any:
    """Around ``sleep_replicas``, which verl calls when a step's rollouts are complete."""

    async def awaited() -> Any:
        result = await original(self, *args, **kwargs)
        _idle()
        return result

    if caller_awaits():
        return awaited()
    result = original(self, *args, **kwargs)
    _idle()
    return result


def on_update(original, self, global_steps: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Around ``update_weights``, after which rollouts go on."""

    async def awaited() -> Any:
        result = original(self, global_steps, *args, **kwargs)
        result = await result if inspect.isawaitable(result) else result
        await asyncio.to_thread(_updated, self, global_steps)
        return result

    if caller_awaits():
        return awaited()
    result = original(self, global_steps, *args, **kwargs)
    _updated(self, global_steps)
    return result


def on_log(original, self, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Tracking.log``: the numbers of the last pause go where verl's go."""
    data = {**data, **_pending}
    _pending.clear()
    return original(self, data, *args, **kwargs)


def _idle() -> None:
    if _job is not None:
        _job.idle()


def _updated(manager: Any, step: int | None) -> None:
    global _job
    if _job is None:
        settings = verl_config.settings(manager.replicas[0].config) if manager.replicas else None
        if settings is None:
            return
        ledger.role("driver")
        _job = Job(**settings)
    began = time.monotonic()

    def call(method: str, given: tuple) -> list[Any]:
        import ray

        asked = [
            replica.server_handle.collective_rpc.remote(method, args=given) for replica in manager.replicas
        ]
        return ray.get(asked, timeout=_LIMIT)

    _job.updated(call, step)
    _pending.update(_job.metrics)
    _pending["timing_s/eagle"] = time.monotonic() - began


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
    evidence="fault",  # only one of a job's drivers has it
    needs=("eagle.verl.update_weights",),
    why="A drafter can be trained at no cost to the rollouts only while they rest.",
    how="Lets the drafter's trainer work from here to the next weight update.",
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
    evidence="fault",
    needs=("eagle.verl.validate_config", "eagle.verl.collective_rpc"),
    why="A drafter falls behind a policy that is trained, and verl brings the replicas nothing but the policy.",
    how="After each update of the policy brings every replica the newest drafter, and the trainer what the "
    "drafter shares with the policy.",
)

LOG = DriverPatch(
    id="eagle.verl.tracking_log",
    targets=("verl.utils.tracking:Tracking.log",),
    wrapper=on_log,
    contract=Contract(params=("data", "step")),
    evidence="fault",
    needs=("eagle.verl.update_weights",),
    why="verl does not log what a drafter of its own training does.",
    how="Adds eagle/* to what the trainer logs next.",
)
