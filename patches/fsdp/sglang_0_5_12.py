"""Audit what schedulers of SGLang 0.5.12 to 0.5.20 receive. It goes when verl pins a newer SGLang than these.

Updates come within the sessions that the family fp8 opens there."""

from __future__ import annotations

from typing import Any

from flashpatch import ledger
from flashpatch.decorate import Patches
from flashpatch.patches._shared import sglang_sessions
from flashpatch.patches.fsdp import sglang

SERIALIZED = "sglang.srt.weight_sync.utils:LocalSerializedTensor"

patches = Patches(
    "fsdp",
    "sglang>=0.5.12,<0.5.21",
    framework="sglang_0_5_12",
    scope="worker",
    # answers the requests of a session, and calls the observers
    needs="fp8.sglang_0_5_12.update_weights_from_tensor",
    remove_when="verl checks what arrives against the trainer's shards.",
)


class Audit:
    """Audit each session; see `sglang_sessions.Observer`."""

    def begin(self, sync: str) -> None:
        sglang.open_audit(sync, patches.at(update_weights_from_tensor))

    def end(self) -> str:
        problem = sglang.of_all_ranks(sglang.problem_found())
        sglang.forget()
        ledger.flush()  # SGLang ends its processes by SIGKILL
        return problem


_AUDIT = Audit()


@patches.register(
    "sglang.srt.managers.scheduler:Scheduler.__init__",
    params="server_args",
    evidence="install",
    why="A sync that ends without its fingerprints would be committed.",
)
def scheduler_init(site: Any) -> Any:
    """Audit each session of an update, and refuse its commit when the audit failed or is incomplete, on any rank."""

    def observed(original, self, *args: Any, **kwargs: Any) -> None:
        ledger.role("worker")
        if _AUDIT not in sglang_sessions.observers:
            sglang_sessions.observers.append(_AUDIT)
        original(self, *args, **kwargs)

    def take_away() -> None:
        if _AUDIT in sglang_sessions.observers:
            sglang_sessions.observers.remove(_AUDIT)
        site.unwrap()

    site.wrap(observed)
    return take_away


@patches.wrap(
    f"{sglang.UPDATERS}:WeightUpdater.update_weights_from_tensor",
    "sglang.srt.model_executor.model_runner:ModelRunner.update_weights_from_tensor",  # before 0.5.16
    relies_on=("_unwrap_tensor", "load_weights", f"{SERIALIZED}.get", *sglang.TP_GROUP),
    evidence="update",
    why="SGLang loads whatever arrives; with wrong weights the policy trains on another's text.",
)
def update_weights_from_tensor(
    original, self, named_tensors: Any, load_format: str | None = None
) -> tuple[bool, str]:
    """Fingerprint each tensor as it arrives, whole, before it is quantized or loaded, and compare with the trainer's before
    the last bucket is loaded. What any rank finds is the answer success=False, which stops the trainer."""
    from sglang.srt.weight_sync.utils import LocalSerializedTensor

    return sglang.load_audited(
        named_tensors, load_format, LocalSerializedTensor, lambda kept: original(self, kept, load_format)
    )
