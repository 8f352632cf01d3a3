"""Follow the memory saver: which weights it takes away, and what no update would bring back.

A released model whose weights SGLang copies to the host (``enable_weights_cpu_backup``, for a drafter also
``enable_draft_weights_cpu_backup``) comes back whole. Without that the policy waits for a complete update. A drafter, which
no update of the policy brings, and what modules of the policy hold beside parameters are copied to the host here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flashpatch.patches.fp8.sglang import initialize_model
from flashpatch.patches.fp8.sglang.schedulers import MANAGER
from flashpatch.patches.fp8.sglang.update_session import owners_of
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.host_copies import HostCopies
    from flashpatch.patches.fp8.refit.managed_model import ManagedModel

ROLES = ("target", "draft")
_copies: weakref.WeakKeyDictionary[ManagedModel, HostCopies] = weakref.WeakKeyDictionary()


def on_release(original, self, recv_req: Any):
    """Around ``release_memory_occupation``."""
    from sglang.srt.runtime_context import get_exec

    features = get_exec().features
    if not features.enable_memory_saver or not has_weights(recv_req.tags):
        return original(self, recv_req)
    whole = features.enable_weights_cpu_backup
    kept = dict(target=whole, draft=whole or features.enable_draft_weights_cpu_backup)
    owners = {role: owners_of(self, role) for role in ROLES}
    return release(owners, kept, lambda: original(self, recv_req))


def on_resume(original, self, recv_req: Any):
    """Around ``resume_memory_occupation``."""
    output = original(self, recv_req)
    if has_weights(recv_req.tags):
        resume(owners_of(self, "all"))
    return output


def has_weights(tags: Sequence[str] | None) -> bool:
    """Whether a request with these tags is about the weights; without any it is about all memory."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    return not tags or GPU_MEMORY_TYPE_WEIGHTS in tags


def release(
    owners: Mapping[str, Sequence[ManagedModel]],
    kept: Mapping[str, bool],
    do: Callable[[], Any],
    by: str = "release_memory_occupation",
) -> Any:
    """Release the memory by ``do`` and return its result; note which models are away, and which are gone.

    Args:
        owners: the managed models by role, target or draft.
        kept: whether SGLang itself keeps the weights of a role.
        do: releases the memory, or overwrites it.
        by: what the user called, for refusals.
    """
    from flashpatch.patches.fp8.refit.host_copies import HostCopies

    unloaded = [tensor for owner in owners["target"] for tensor in owner.never_loaded()]
    updated = {id(tensor) for owner in owners["target"] for tensor in owner.parameters()}
    updated -= {id(tensor) for tensor in unloaded}
    policy = [tensor for owner in owners["target"] for tensor in owner.parameters() if id(tensor) in updated]
    for role in ROLES:
        for owner in () if kept[role] else owners[role]:
            if owner not in _copies:  # else it is away already, and there is nothing to copy
                tensors = [*owner.constants(), *owner.never_loaded()] if role == "target" else owner.tensors()
                _copies[owner] = HostCopies(tensors, without=policy)
    output = do()
    for role in ROLES:
        for owner in owners[role]:
            owner.asleep = True
            if role == "target" and not kept[role]:
                owner.mark_discarded(by=by)
    return output


def resume(owners: Sequence[ManagedModel]) -> None:
    """Note that the memory of these models is there again, and bring back what was copied."""
    for owner in owners:
        copies = _copies.pop(owner, None)
        if copies is not None:
            copies.restore()
        owner.asleep = False


_patch = partial(
    Patch,
    requires="sglang>=0.5.21",
    scope=frozenset({"engine-core"}),
    evidence="optional",
    needs=("fp8.sglang.initialize_model",),
    remove_when=initialize_model.PATCH.remove_when,
)

RELEASE = _patch(
    id="fp8.sglang.release_memory_occupation",
    targets=(f"{MANAGER}.release_memory_occupation",),
    wrapper=on_release,
    contract=Contract(
        params=("recv_req",),
        mentions=("recv_req.tags", "GPU_MEMORY_TYPE_WEIGHTS"),
        exists=("sglang.srt.runtime_context:get_exec",),
    ),
    why="After the weights' memory was freed, SGLang would generate from undefined values, with a drafter that nobody sends "
    "again; an update would write into memory that is not there.",
    how="Marks the policy as broken until a complete update and refuses updates until the memory is back, unless SGLang "
    "keeps a copy on the host; copies the drafter to the host.",
)

RESUME = _patch(
    id="fp8.sglang.resume_memory_occupation",
    targets=(f"{MANAGER}.resume_memory_occupation",),
    wrapper=on_resume,
    contract=Contract(params=("recv_req",), mentions=("recv_req.tags", "GPU_MEMORY_TYPE_WEIGHTS")),
    why="What was copied to the host must be in place before an update reads it.",
    how="Copies it back once the memory of weights is there again, and lets updates begin.",
)
