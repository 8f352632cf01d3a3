"""Schedule nothing unless the models of this process hold one whole policy."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashpatch import engine, ledger
from flashpatch.patches._shared.tally import count
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.sglang import initialize_model, schedulers
from flashpatch.record import Contract, Patch

SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
MARK = "[flashpatch: fp8.sglang.get_next_batch_to_run]"


def on_init(original, self, *args: Any, **kwargs: Any):
    """Around ``Scheduler.__init__``."""
    engine.require("fp8")
    ledger.role("engine-core")
    schedulers.track(self)
    original(self, *args, **kwargs)


def on_next_batch(original, self, *args: Any, **kwargs: Any):
    """Around ``get_next_batch_to_run``: end requests with the reason when no model may generate."""
    broken = first_unservable()
    if broken is not None:
        _abort_all(self, f"{MARK} {broken.policy().why_refused()}. Send a complete update.")
    return original(self, *args, **kwargs)


def first_unservable() -> model_registry.ManagedModel | None:
    """Return a model that may not generate now, or None."""
    return next((owner for owner in model_registry.all_models() if not owner.may_generate), None)


def _abort_all(scheduler: Any, message: str) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    if not scheduler.waiting_queue and scheduler.running_batch.is_empty():
        return
    ledger.event("refused", what="requests", problem=message)
    count("requests_refused")
    reason = {"type": "abort", "status_code": 503, "message": message}
    scheduler.abort_request(AbortReq(abort_all=True, finished_reason=reason))


_patch = partial(
    Patch,
    requires="sglang>=0.5.21",
    scope=frozenset({"engine-core"}),
    remove_when=initialize_model.PATCH.remove_when,
)

INIT = _patch(
    id="fp8.sglang.scheduler_init",
    targets=(f"{SCHEDULER}.__init__",),
    wrapper=on_init,
    contract=Contract(
        params=("server_args",), exists=(f"{SCHEDULER}.is_fully_idle", f"{SCHEDULER}.flush_cache")
    ),
    evidence="install",
    why="Only the scheduler knows whether requests run, and holds the cache to flush.",
    how="Remembers the schedulers of this process.",
)

STEP = _patch(
    id="fp8.sglang.get_next_batch_to_run",
    targets=(f"{SCHEDULER}.get_next_batch_to_run",),
    wrapper=on_next_batch,
    contract=Contract(
        exists=(
            f"{SCHEDULER}.abort_request",
            "sglang.srt.managers.io_struct:AbortReq.abort_all",
            "sglang.srt.managers.io_struct:AbortReq.finished_reason",
        ),
    ),
    evidence="step",
    needs=("fp8.sglang.scheduler_init", "fp8.sglang.initialize_model"),
    why="An engine that schedules on half-updated weights serves a policy that never existed.",
    how="Checks one flag per model before each batch; ends the requests with the reason.",
)
