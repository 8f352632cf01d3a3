"""Follow ``/weights_checker``: its ``reset_tensors`` overwrites a model with random values, to show that an update brings all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flashpatch.patches.fp8.sglang import initialize_model, memory
from flashpatch.patches.fp8.sglang.schedulers import MANAGER
from flashpatch.patches.fp8.sglang.update_session import owners_of
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.managed_model import ManagedModel

RESET = "reset_tensors"


def on_check(original, self, recv_req: Any):
    """Around ``check_weights``."""
    return check(recv_req, lambda role: owners_of(self, role), lambda: original(self, recv_req))


def check(
    recv_req: Any, owners_of_role: Callable[[str], Sequence[ManagedModel]], do: Callable[[], Any]
) -> Any:
    """Do what is asked for, and return its result; after a reset the policy waits for a complete update.

    What no update brings back is written back: a drafter, and what modules of the policy hold beside parameters.

    Args:
        recv_req: SGLang's ``CheckWeightsReqInput``; before 0.5.21 it selects no role, and means all.
        owners_of_role: returns the managed models of a role, target or draft.
        do: SGLang's own function.
    """
    if recv_req.action != RESET:
        return do()
    selector = getattr(recv_req, "selector", "all")
    owners: Mapping[str, Sequence[ManagedModel]] = {
        role: owners_of_role(role) if selector in (role, "all") else () for role in memory.ROLES
    }
    try:
        return memory.release(owners, dict.fromkeys(memory.ROLES, False), do, by=RESET)
    finally:
        memory.resume([owner for role in memory.ROLES for owner in owners[role]])


record = partial(
    Patch,
    scope=frozenset({"engine-core"}),
    evidence="optional",
    contract=Contract(params=("recv_req",), mentions=("recv_req.action",)),
    why="SGLang goes on generating from the random values that a reset leaves, under the version of the policy before.",
    how="Refuses requests until a complete update has come, and writes back what none brings.",
    remove_when=initialize_model.PATCH.remove_when,
)

PATCH = record(
    id="fp8.sglang.check_weights",
    targets=(f"{MANAGER}.check_weights",),
    tested=("0.5.23",),
    requires="sglang>=0.5.21",
    needs=("fp8.sglang.initialize_model",),
    wrapper=on_check,
)
