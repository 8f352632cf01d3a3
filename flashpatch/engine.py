"""Query this process's engine: which families are on, and the state and calls of each patch."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flashpatch import ledger, registry
from flashpatch.arming import call_counter, standby
from flashpatch.arming.group import Group, Member
from flashpatch.arming.manager import Manager
from flashpatch.arming.preflight import packages
from flashpatch.contracts import contract
from flashpatch.contracts.source import RootFor
from flashpatch.errors import PatchError
from flashpatch.patch_status import PatchStatus
from flashpatch.record import State
from flashpatch.settings import options as options_of

manager = Manager()
switching = threading.RLock()
"""Held while a selection is read, changed and activated; never by an import hook."""

problem: str | None = None
"""Why the environment could not be obeyed, or None."""


def enabled(family: str) -> bool:
    """Whether a family is on in this process."""
    standby.wake()
    return family in manager.selection.choices


def options(family: str) -> Mapping[str, Any]:
    """Return all options of a family; the mapping follows later changes. Raises PatchError if it was never on in this process."""
    standby.wake()
    if family not in manager.options:
        raise PatchError("is not enabled.", patch=family, advice=f"Call flashpatch.enable({family!r}) first.")
    return MappingProxyType(manager.options[family])


def require(name: str) -> None:
    """Raise unless a family can act; call it where the family's capability is first needed.

    What is not imported yet does not count against it. In strict mode neither may another tool sit on top of one of its patches.

    Args:
        name: a family, or a name that stands for one.

    Raises:
        PatchError: the name is unknown or not enabled, or the family was refused; the message says why."""
    family = registry.family_of(name).name
    if not enabled(family):
        raise PatchError(
            "is required and not enabled.",
            patch=name,
            advice=problem or f"Set FLASHPATCH={name} or call flashpatch.enable({name!r}).",
        )
    for group in manager.groups[family]:
        group.check()
        for member in group.members if manager.selection.strict else ():
            state = member.observed()
            if state.word == "displaced":
                raise PatchError(
                    f"is displaced by {state.detail}.",
                    patch=member.patch.id,
                    target=member.target,
                    version=str(member.installed),
                    advice="Apply the other patch before FlashPatch, or not at all.",
                )


def record_call(patch_id: str) -> None:
    """Count one observed call of a patch that is a registration, not a wrapper. Raises PatchError if it was never on in this process."""
    standby.wake()
    if patch_id not in manager.members:
        raise PatchError("was called and is not enabled.", patch=patch_id, advice="Enable its family first.")
    manager.members[patch_id][1].counter.hit()


def statuses() -> dict[str, PatchStatus]:
    """Every known patch by id, those of families that are off included."""
    standby.wake()
    known = {patch_id: PatchStatus(patch_id, State("disabled")) for patch_id in registry.patch_ids()}
    return {**known, **{status.id: status for status in _statuses()}}


def snapshot() -> dict[str, Any]:
    """Return the engine's part of the ledger row, cheap enough to call once a second.

    Returns:
        ``patches``: id to ``state``, ``detail``, ``calls``, ``target``, ``tested``, of all patches that are
        not disabled or were called; ``versions``: distribution to version, of frameworks that were looked at; ``on``: family
        to ``name``, as the user typed it, ``options``, those that differ from their defaults, and ``off`` if it is off
        again; ``error``: the last error, or None."""
    call_counter.changes.settle()
    rows = _statuses()
    seen = (member.installed for _, member in list(manager.members.values()))
    errors = [row.error for row in rows if row.error]
    return {
        "patches": {
            row.id: {
                "state": row.state.word,
                "detail": row.state.detail,
                "calls": row.calls,
                "target": row.target,
                "tested": row.tested,
            }
            for row in rows
            if row.state.word != "disabled" or row.calls
        },
        "versions": {found.distribution: found.version for found in seen if found is not None},
        "on": {
            family: {"name": one.name, "options": options_of.changed(registry.family(family), one.options)}
            | ({} if family in manager.selection.choices else {"off": True})
            for family, one in manager.chosen.items()
        },
        "error": errors[-1] if errors else problem,
    }


def _statuses() -> list[PatchStatus]:
    """Every patch of families that were ever on; each package is looked for once, as that takes the import finders."""
    root_for = functools.cache(contract.installed_root)
    return [_status(group, member, root_for) for group, member in list(manager.members.values())]


def _status(group: Group, member: Member, root_for: RootFor) -> PatchStatus:
    state = member.observed()
    if state.word == "waiting" and not group.checked:
        needed = sorted(packages(member.patch))
        if not any(map(root_for, needed)):
            state = State("skipped", f"{', '.join(needed)} is not installed")
    return PatchStatus(
        id=member.patch.id,
        state=state,
        calls=member.counter.calls(),
        target=member.target,
        version=str(member.installed) if member.installed else "",
        tested=member.patch.tested_on(member.installed.version) if member.installed else None,
        error=member.error,
    )


def _after_fork() -> None:
    global switching
    switching = threading.RLock()
    manager.after_fork()
    call_counter.after_fork()


call_counter.changes.listener = ledger.touch
os.register_at_fork(after_in_child=_after_fork)
