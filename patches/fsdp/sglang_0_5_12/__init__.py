"""Audit the weights that schedulers of SGLang 0.5.12 receive within the sessions that the family fp8 opens there."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashpatch import ledger
from flashpatch.patches._shared import sglang_sessions
from flashpatch.patches.fsdp.sglang import update_session, weight_updater
from flashpatch.record import Contract, Patch

MODULE = "sglang.srt.model_executor.model_runner"
SESSIONS = "fp8.sglang_0_5_12.update_weights_from_tensor"
"""The patch that answers the requests of a session, and calls the observers. Families import no other."""


class Audit:
    """Audit each session; see `sglang_sessions.Observer`."""

    def begin(self, sync: str) -> None:
        update_session.open_audit(sync, TENSOR.id, TENSOR.targets[0])

    def end(self) -> str:
        problem = weight_updater.of_all_ranks(update_session.problem_found())
        update_session.forget()
        ledger.flush()  # SGLang ends its processes by SIGKILL
        return problem


_AUDIT = Audit()


def on_init(original, self, *args: Any, **kwargs: Any) -> None:
    """Around ``Scheduler.__init__``: audit the sessions of this process."""
    ledger.role("worker")
    if _AUDIT not in sglang_sessions.observers:
        sglang_sessions.observers.append(_AUDIT)
    original(self, *args, **kwargs)


def on_tensor(original, self, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
    """Around ``update_weights_from_tensor``: take the messages out and audit the rest before it is loaded."""
    from sglang.srt.model_executor.model_runner import LocalSerializedTensor

    return weight_updater.load_audited(
        named_tensors, load_format, LocalSerializedTensor, lambda kept: original(self, kept, load_format)
    )


def _undo(site: Any) -> None:
    if _AUDIT in sglang_sessions.observers:
        sglang_sessions.observers.remove(_AUDIT)
    site.unwrap()


_patch = partial(
    Patch,
    requires="sglang>=0.5.12,<0.5.13",
    scope=frozenset({"worker"}),
    needs=(SESSIONS,),
    remove_when="verl checks what arrives against the trainer's shards.",
)

INIT = _patch(
    id="fsdp.sglang_0_5_12.scheduler_init",
    targets=("sglang.srt.managers.scheduler:Scheduler.__init__",),
    wrapper=on_init,
    undo=_undo,
    evidence="install",
    contract=Contract(params=("server_args",)),
    why=update_session.END.why,
    how="Audits each session of an update, and refuses its commit when the audit failed or is incomplete, on any rank.",
)

TENSOR = _patch(
    id="fsdp.sglang_0_5_12.update_weights_from_tensor",
    targets=(f"{MODULE}:ModelRunner.update_weights_from_tensor",),
    wrapper=on_tensor,
    evidence="update",
    contract=Contract(
        params=("named_tensors", "load_format"),
        mentions=("_unwrap_tensor", "self.model"),
        exists=(
            f"{MODULE}:LocalSerializedTensor.get",
            "sglang.srt.distributed.parallel_state:get_tp_group",
            "sglang.srt.distributed.parallel_state:GroupCoordinator.cpu_group",
        ),
    ),
    why=weight_updater.TENSOR.why,
    how=weight_updater.TENSOR.how,
)

PATCHES = (INIT, TENSOR)
"""The patches of this group."""
