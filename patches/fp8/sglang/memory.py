"""Follow what takes weights away or overwrites them outside of updates: the memory saver, and ``/weights_checker``.

A released model whose weights SGLang copies to the host (``enable_weights_cpu_backup``, for a drafter also
``enable_draft_weights_cpu_backup``) comes back whole. Without that the policy waits for a complete update. A drafter, which
no update of the policy brings, and what modules of the policy hold beside parameters are copied to the host here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashpatch.decorate import Patches
from flashpatch.patches.fp8.sglang.schedulers import REMOVE_WHEN
from flashpatch.patches.fp8.sglang.update_session import MANAGER, owners_of
from flashpatch.patches.fp8.witness import Witness

if TYPE_CHECKING:
    from flashpatch.patches.fp8.update.model import ManagedModel
    from flashpatch.patches.fp8.update.tensors import HostCopies

ROLES = ("target", "draft")
RESET = "reset_tensors"
TAGS = ("recv_req.tags", "GPU_MEMORY_TYPE_WEIGHTS")

_witness = Witness()
_copies: weakref.WeakKeyDictionary[ManagedModel, HostCopies] = weakref.WeakKeyDictionary()

patches = Patches("fp8", "sglang>=0.5.21", scope="engine-core", evidence="optional", remove_when=REMOVE_WHEN)


@patches.wrap(
    f"{MANAGER}.release_memory_occupation",
    relies_on=(*TAGS, "sglang.srt.runtime_context:get_exec"),
    why="After the weights' memory was freed, SGLang would generate from undefined values, with a drafter that nobody sends "
    "again; an update would write into memory that is not there.",
)
def release_memory_occupation(original, self, recv_req: Any):
    """Mark the policy as broken until a complete update and refuse updates until the memory is back, unless SGLang keeps a
    copy on the host; copy the drafter to the host."""
    from sglang.srt.runtime_context import get_exec

    return release_as_asked(
        recv_req, get_exec().features, lambda role: owners_of(self, role), lambda: original(self, recv_req)
    )


def release_as_asked(
    recv_req: Any,
    settings: Any,
    owners_of_role: Callable[[str], Sequence[ManagedModel]],
    do: Callable[[], Any],
) -> Any:
    """Answer a request to release memory.

    Args:
        recv_req: SGLang's ``ReleaseMemoryOccupationReqInput``.
        settings: of the engine: which weights SGLang itself copies to the host.
        owners_of_role, do: see `check`."""
    if not settings.enable_memory_saver or not has_weights(recv_req.tags):
        return do()
    whole = settings.enable_weights_cpu_backup
    kept = dict(target=whole, draft=whole or settings.enable_draft_weights_cpu_backup)
    return release({role: owners_of_role(role) for role in ROLES}, kept, do)


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
        by: what the user called, for refusals."""
    from flashpatch.patches.fp8.update.tensors import HostCopies

    policy = [tensor for owner in owners["target"] for tensor in owner.brought()]
    away = dict(_copies)
    try:
        for role in ROLES:
            for one in () if kept[role] else owners[role]:
                if one not in _copies:  # else it is away already, and there is nothing to copy
                    tensors = [*one.constants(), *one.never_loaded()] if role == "target" else one.tensors()
                    _copies[one] = HostCopies(tensors, without=policy)
        output = do()
    except BaseException:  # nothing went away: an old copy must not come back later
        for owner in _copies.keys() - away.keys():
            del _copies[owner]
        raise
    for role in ROLES:
        for owner in owners[role]:
            owner.asleep = True
            if role == "target" and not kept[role]:
                owner.mark_discarded(by=by)
    return output


@patches.wrap(
    f"{MANAGER}.resume_memory_occupation",
    relies_on=TAGS,
    why="What was copied to the host must be in place before an update reads it.",
)
def resume_memory_occupation(original, self, recv_req: Any):
    """Copy it back once the memory of weights is there again, and let updates begin."""
    output = original(self, recv_req)
    if has_weights(recv_req.tags):
        resume(owners_of(self, "all"))
    return output


def has_weights(tags: Sequence[str] | None) -> bool:
    """Whether a request with these tags is about the weights; without any it is about all memory."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    return not tags or GPU_MEMORY_TYPE_WEIGHTS in tags


def resume(owners: Sequence[ManagedModel]) -> None:
    """Note that the memory of these models is there again, and bring back what was copied."""
    for owner in owners:
        copies = _copies.pop(owner, None)
        if copies is not None:
            copies.restore()
        owner.asleep = False


@patches.wrap(
    f"{MANAGER}.check_weights",
    relies_on="recv_req.action",
    tested="0.5.23",
    why="SGLang goes on generating from the random values that a reset leaves, under the version of the policy before.",
)
def check_weights(original, self, recv_req: Any):
    """Refuse requests until a complete update has come after a reset to random values, and write back what none brings."""
    return check(recv_req, lambda role: owners_of(self, role), lambda: original(self, recv_req))


def check(
    recv_req: Any, owners_of_role: Callable[[str], Sequence[ManagedModel]], do: Callable[[], Any]
) -> Any:
    """Do what is asked for, and return its result; after a reset the policy waits for a complete update.

    What no update brings back is written back: a drafter, and what modules of the policy hold beside parameters.

    Args:
        recv_req: SGLang's ``CheckWeightsReqInput``; before 0.5.21 it selects no role, and means all.
        owners_of_role: returns the managed models of a role, target or draft.
        do: SGLang's own function."""
    if recv_req.action != RESET:
        output = do()
        if recv_req.action == "checksum" and output.success:
            _hear(owners_of_role("target"), output.payload)
        return output
    selector = getattr(recv_req, "selector", "all")
    owners: Mapping[str, Sequence[ManagedModel]] = {
        role: owners_of_role(role) if selector in (role, "all") else () for role in ROLES
    }
    try:
        return release(owners, dict.fromkeys(ROLES, False), do, by=RESET)
    finally:
        resume([owner for role in ROLES for owner in owners[role]])


def _hear(owners: Sequence[ManagedModel], payload: Any) -> None:
    """Note SGLang's own checksums of a policy that is whole, of each rank; a drafter has versions of its own."""
    if not owners or not all(owner.may_generate for owner in owners):
        return
    ranks = [getattr(rank, "checksums", None) or rank["checksums"] for rank in payload]
    target = [{name: one for name, one in rank.items() if not name.startswith("draft")} for rank in ranks]
    _witness.heard(owners[0].version, patches.of(check_weights).id, target)
