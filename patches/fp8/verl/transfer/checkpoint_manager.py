"""The driver: after a sync all replicas hold one policy, or the trainer stops."""

from __future__ import annotations

import inspect
from typing import Any

from flashpatch import ledger
from flashpatch.patches._shared.awaits import caller_awaits
from flashpatch.patches.fp8.verl.correction.rollout_correction import mismatch
from flashpatch.patches.fp8.verl.transfer import receipts
from flashpatch.record import Contract, Patch

MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"
_book = receipts.Book()
_pending: dict[str, float] = {}  # metrics of the last sync, until they are logged


def on_update(original, self, global_steps: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Around ``update_weights``, which returns its result or a coroutine, as its caller asks."""

    judged = _uses_vllm(self)

    async def awaited() -> Any:
        result = original(self, global_steps, *args, **kwargs)
        result = await result if inspect.isawaitable(result) else result
        if judged:
            _settle(global_steps, [await call for call in _ask(self)])
        return result

    if caller_awaits():
        return awaited()
    result = original(self, global_steps, *args, **kwargs)
    if judged:
        import ray

        _settle(global_steps, ray.get(_ask(self)))
    return result


def on_log(original, self, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Tracking.log``: the last sync's numbers go where verl's go."""
    data = {**data, **_pending}
    _pending.clear()
    return original(self, data, *args, **kwargs)


def _uses_vllm(manager: Any) -> bool:
    """Whether rollouts are vLLM's: others have transfers of their own, which leave no receipts."""
    kinds = [kind.__module__ for replica in manager.replicas for kind in type(replica).__mro__]
    return any(module.startswith("verl.workers.rollout.vllm_rollout") for module in kinds)


def _ask(manager: Any) -> list[Any]:
    """Calls that fetch the receipts from all processes that sent weights to rollout workers."""
    if manager.backend == "naive":
        senders = manager.actor_wg._workers
    else:
        senders = [worker for replica in manager.replicas for worker in replica.workers]
    return [sender.__ray_call__.remote(_taker()) for sender in senders]


def _taker() -> Any:
    """A function that Ray pickles by value, so that it also runs where FlashPatch is not installed."""

    def take(actor: Any) -> list | None:
        try:
            from flashpatch.patches.fp8.verl.transfer import receipts
        except ImportError:
            return None
        return receipts.take()

    return take


def _settle(step: int | None, given: list) -> None:
    _book.check(step, given)
    numbers = receipts.metrics(given)
    mismatch.MONITOR.updated(receipts.errors(given))
    _pending.update(numbers)
    ledger.role("driver")
    ledger.note(sync_step=step, sync={name: round(value, 4) for name, value in numbers.items()})


_COMMON = dict(requires="verl>=0.9", scope=frozenset({"driver"}), tested=("0.9.1",))

UPDATE = Patch(
    id=receipts.ID,
    targets=(f"{MANAGER}.update_weights",),
    wrapper=on_update,
    contract=Contract(
        params=("global_steps",),
        mentions=("self.backend", "self.actor_wg", "self.replicas"),
        exists=(
            "verl.utils.ray_utils:auto_await",
            "verl.single_controller.ray.base:RayWorkerGroup._init_with_resource_pool",
        ),
    ),
    evidence="fault",  # only one of a job's drivers has it
    needs=("fp8.verl.server_adapter_update_weights",),
    why="A replica that kept an old policy, or has committed twice, is trained on as if it had the new one.",
    how="Collects the receipts of all ranks after each sync and compares steps and versions.",
    remove_when="verl compares what its replicas committed.",
    **_COMMON,
)

LOG = Patch(
    id="fp8.verl.tracking_log",
    targets=("verl.utils.tracking:Tracking.log",),
    wrapper=on_log,
    contract=Contract(params=("data", "step")),
    evidence="fault",
    needs=(receipts.ID,),
    why="verl logs how long an update took, not where.",
    how="Adds timing_s/sync/* and sync/* to what the trainer logs next.",
    remove_when="verl logs the parts of a sync.",
    **_COMMON,
)
