"""Begin the audit with SGLang's update session, and end it before the session is committed."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.patches.fsdp.arrival import Arrival
from flashpatch.patches.fsdp.sglang.weight_updater import (
    ID,
    TARGET,
    Refused,
    Session,
    of_all_ranks,
)
from flashpatch.record import Contract, Patch

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"


def on_begin(original, self, recv_req: Any) -> Any:
    """Around ``begin_weight_update``: audit the session, unless it is a drafter's.

    verl's trainer names its sync in the request: such a session must bring fingerprints.
    """
    ledger.role("worker")
    output = original(self, recv_req)
    if output.success:
        forget()
        if recv_req.selector != "draft":
            open_audit(recv_req.rid or "", ID, TARGET)
    return output


def on_end(original, self, recv_req: Any) -> Any:
    """Around ``end_weight_update``: refuse to commit when the audit failed or is incomplete, on any rank."""
    from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput

    if self._session is None:
        return original(self, recv_req)
    Session.problem = of_all_ranks(problem_found())
    problem = Session.problem
    try:
        output = original(self, recv_req)
    except Refused as refused:
        self._session = None
        output = EndWeightUpdateReqOutput(success=False, message=str(refused))
    if self._session is None:  # else requests are running, and the end is to be asked for again
        forget()
        ledger.flush()  # SGLang ends its processes by SIGKILL
        if problem and problem not in output.message:
            output = EndWeightUpdateReqOutput(success=False, message=problem)
    return output


def open_audit(sync: str, patch: str, target: str) -> None:
    """Audit the session that is open; one whose sender named its sync must bring fingerprints.

    Args:
        sync: the sender's name of it, or empty.
        patch, target: of the patch that receives; errors name them.
    """
    forget()
    Session.arrival = Arrival(engine.options("fsdp")["audit"], patch, target, bool(sync))


def problem_found() -> str:
    """Return why the audit of this rank failed, or an empty string."""
    if Session.arrival is None:
        return ""
    try:
        Session.arrival.ends()
    except PatchError as error:
        return str(error)
    return ""


def forget() -> None:
    if Session.arrival is not None:
        Session.arrival.close()
    Session.arrival, Session.problem = None, ""


_patch = partial(
    Patch,
    requires="sglang>=0.5.21",
    evidence="update",
    scope=frozenset({"worker"}),
    remove_when="verl checks what arrives against the trainer's shards.",
)

BEGIN = _patch(
    id="fsdp.sglang.begin_weight_update",
    targets=(f"{MANAGER}.begin_weight_update",),
    wrapper=on_begin,
    contract=Contract(
        params=("recv_req",),
        mentions=("self._session", "recv_req.selector"),
        exists=("sglang.srt.managers.io_struct:BeginWeightUpdateReqInput.selector",),
    ),
    why="An audit covers the buckets of one sync, which SGLang's session delimits.",
    how="Starts an audit with each session that updates the policy.",
)

END = _patch(
    id="fsdp.sglang.end_weight_update",
    targets=(f"{MANAGER}.end_weight_update",),
    wrapper=on_end,
    contract=Contract(
        params=("recv_req",),
        mentions=("self._session", "runner.weight_updater.end_weight_update"),
        exists=("sglang.srt.managers.io_struct:EndWeightUpdateReqOutput",),
    ),
    why="A sync that ends without its fingerprints would be committed.",
    how="Ends the audit before the commit; what any rank found is the answer success=False on all of them.",
)
