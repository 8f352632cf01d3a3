"""Follow the scheduler processes of SGLang 0.5.12, and schedule nothing unless their models hold one whole policy."""

from __future__ import annotations

from typing import Any

from flashpatch import engine, ledger
from flashpatch.patches._shared.tally import count
from flashpatch.patches.fp8.sglang import expected_processes, scheduler_gate, schedulers
from flashpatch.patches.fp8.sglang_0_5_12.record import FRAMEWORK, for_old_sglang
from flashpatch.patches.fp8.sglang_0_5_12.scheduler import idle
from flashpatch.record import Contract

SCHEDULER = scheduler_gate.SCHEDULER
MARK = f"[flashpatch: {FRAMEWORK}.get_next_batch_to_run]"


def on_init(original, self, *args: Any, **kwargs: Any):
    """Around ``Scheduler.__init__``."""
    engine.require("fp8")
    ledger.role("engine-core")
    schedulers.track(self, idle)
    original(self, *args, **kwargs)


def on_next_batch(original, self, *args: Any, **kwargs: Any):
    """Around ``get_next_batch_to_run``: end requests with the reason when no model may generate."""
    broken = scheduler_gate.first_unservable()
    if broken is not None:
        _abort_all(self, f"{MARK} {broken.policy().why_refused()}. Send a complete update.")
    return original(self, *args, **kwargs)


def _abort_all(scheduler: Any, message: str) -> None:
    """End all requests. SGLang 0.5.12 gives one that waits no reason, so it is answered here."""
    from sglang.srt.managers.io_struct import AbortReq

    if not scheduler.waiting_queue and scheduler.running_batch.is_empty():
        return
    ledger.event("refused", what="requests", problem=message)
    count("requests_refused")
    reason = {"type": "abort", "status_code": 503, "message": message}
    while scheduler.waiting_queue:
        request = scheduler.waiting_queue.pop()
        scheduler.send_to_tokenizer.send_output(AbortReq(rid=request.rid, finished_reason=reason), request)
    scheduler.abort_request(AbortReq(abort_all=True, abort_message=message))


INIT = for_old_sglang(
    id=f"{FRAMEWORK}.scheduler_init",
    targets=(f"{SCHEDULER}.__init__",),
    wrapper=on_init,
    contract=scheduler_gate.INIT.contract,
    evidence="install",
    scope=frozenset({"engine-core"}),
    why=scheduler_gate.INIT.why,
    how=scheduler_gate.INIT.how,
)

STEP = for_old_sglang(
    id=f"{FRAMEWORK}.get_next_batch_to_run",
    targets=(f"{SCHEDULER}.get_next_batch_to_run",),
    wrapper=on_next_batch,
    contract=Contract(
        exists=(
            f"{SCHEDULER}.abort_request",
            "sglang.srt.managers.io_struct:AbortReq.abort_all",
            "sglang.srt.managers.io_struct:AbortReq.abort_message",
            "sglang.srt.managers.io_struct:AbortReq.finished_reason",
        ),
    ),
    evidence="step",
    scope=frozenset({"engine-core"}),
    needs=(f"{FRAMEWORK}.scheduler_init", f"{FRAMEWORK}.initialize_model"),
    why=scheduler_gate.STEP.why,
    how=scheduler_gate.STEP.how,
)

LAUNCH = for_old_sglang(
    id=f"{FRAMEWORK}.launch_scheduler_processes",
    targets=expected_processes.PATCH.targets,
    wrapper=expected_processes.on_launch,
    contract=expected_processes.PATCH.contract,
    evidence="optional",
    when="child=engine-core",
    scope=frozenset({"driver"}),
    why=expected_processes.PATCH.why,
    how=expected_processes.PATCH.how,
)
