"""Stop the trainer unless all replicas hold one policy after a sync; log the sync's times."""

from __future__ import annotations

from typing import Any

from flashpatch import ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared import step_metrics
from flashpatch.patches._shared.awaits import caller_awaits, resolve
from flashpatch.patches._shared.context import timed
from flashpatch.patches.fp8.verl.delta_versions import VERSIONS
from flashpatch.patches.fp8.verl.transfer import receipts
from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC

MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"
_RECEIPTS = ("verl.workers.rollout.vllm_rollout", "verl.workers.rollout.sglang_rollout")


patches = Patches("fp8", "verl>=0.9", scope="driver")


@patches.wrap(
    f"{MANAGER}.update_weights",
    relies_on=(
        "self.backend",
        "self.actor_wg",
        "self.replicas",
        "verl.utils.ray_utils:auto_await",
        "verl.single_controller.ray.base:RayWorkerGroup._init_with_resource_pool",
    ),
    evidence="update",
    when="anywhere=fp8.verl.validate_config_rollout",
    why="A replica that kept an old policy, or has committed twice, is trained on as if it had the new one.",
    remove_when="verl compares what its replicas committed.",
)
def checkpoint_manager_update_weights(
    original, self, global_steps: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Collect the receipts of all ranks after each sync and compare steps and versions.

    Like verl's it returns its result or a coroutine, as its caller asks."""

    kinds = [kind.__module__ for replica in self.replicas for kind in type(replica).__mro__]
    judged = any(
        module.startswith(_RECEIPTS) for module in kinds
    )  # other engines' transfers leave no receipts

    async def awaited() -> Any:
        result = await resolve(original(self, global_steps, *args, **kwargs))
        if judged:
            _check_and_record(global_steps, [await call for call in _collect_calls(self)], result)
        return result

    if caller_awaits():
        return awaited()
    result = original(self, global_steps, *args, **kwargs)
    if judged:
        import ray

        _check_and_record(global_steps, ray.get(_collect_calls(self)), result)
    return result


def _collect_calls(manager: Any) -> list[Any]:
    """Start calls that fetch the receipts of all processes that sent weights to rollout workers."""
    if manager.backend == "naive":
        senders = manager.actor_wg._workers
    else:
        senders = [worker for replica in manager.replicas for worker in replica.workers]
    return [sender.__ray_call__.remote(_receipt_taker()) for sender in senders]


def _receipt_taker() -> Any:
    """Return a function that Ray pickles by value, so that it also runs where FlashPatch is not installed."""

    def take(actor: Any) -> list | None:
        try:
            from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
        except ImportError:
            return None
        return WEIGHT_SYNC.take_receipts()

    return take


def _check_and_record(step: int | None, given: list, result: Any) -> None:
    """Compare the receipts; keep the sync's numbers, those in verl's result too, for the log and the ledger."""
    try:
        WEIGHT_SYNC.worker_versions.check(step, given)
    except PatchError as error:
        ledger.event("error", what="weight sync", step=step, problem=error.problem)
        raise
    sent = {name: value for name, value in (result or {}).items() if "sync/" in name}
    numbers = {**receipts.metrics(given), **sent}
    VERSIONS.learn(receipts.wide(given))
    WEIGHT_SYNC.metrics.update(numbers)
    ledger.role("driver")
    ledger.note(sync_step=step, sync={name: round(value, 4) for name, value in numbers.items()})
    ledger.event("sync", step=step, **{name: round(value, 6) for name, value in numbers.items()})


@patches.wrap(
    "verl.utils.tracking:Tracking.log",
    params=("data", "step"),
    evidence="optional",
    why="verl logs how long an update took, not where.",
    remove_when="verl logs the parts of a sync.",
)
def tracking_log(original, self, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Add timing_s/sync/* and sync/* to what the trainer logs next; keep it for the report."""
    data = {**data, **WEIGHT_SYNC.take_metrics()}
    step_metrics.record(data, kwargs.get("step", args[0] if args else None))
    return original(self, data, *args, **kwargs)


@patches.wrap(
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.get_per_tensor_param",
    relies_on="self.module.state_dict",
    params=("layered_summon", "base_sync_done"),
    evidence="update",
    when="anywhere=fsdp.verl.get_sharding_strategy anywhere=fp8.verl.validate_config_rollout",
    scope="trainer",
    why="Under FSDP1 the gathering of a sync happens before the sync, where its time is lost.",
    remove_when="verl logs the parts of a sync.",
)
def get_per_tensor_param(original, self, *args: Any, **kwargs: Any) -> Any:
    """Count the gathering of whole weights, before the generator starts, towards the next sync's gather."""
    with timed(WEIGHT_SYNC, "export_seconds"):
        return original(self, *args, **kwargs)
