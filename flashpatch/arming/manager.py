"""Arm and disarm patches in this process, and keep the state of each with its reason.

A group (`flashpatch.arming.group`) is checked from source when the first of its modules is imported, and each
member armed as its own module is; one that cannot be takes the whole group down. Imports are never broken:
a refusal is logged, kept in the states, and raised where the capability is used.

The lock guards bookkeeping only. Code of patches and frameworks runs outside it, since it may import modules
that another thread is importing while it waits here."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

from flashpatch import index, ledger, registry
from flashpatch.arming.call_counter import changes
from flashpatch.arming.group import DISABLED, WAITING, Group, Member, groups_of
from flashpatch.arming.import_hooks import is_ready, when_ready
from flashpatch.arming.preflight import examine, module_of, other_generation
from flashpatch.arming.site import Owned, Site
from flashpatch.contracts import contract, source
from flashpatch.contracts.source import RootFor
from flashpatch.errors import PatchError
from flashpatch.log import log
from flashpatch.record import State
from flashpatch.settings.selections import NOTHING, Choice, Selection


class Manager:
    """Hold all groups ever switched on in this process; `flashpatch.engine` has the one instance.

    Attributes:
        selection: what is switched on.
        groups: family name to its groups.
        members: patch id to its group and member.
        options: family name to its options; the dictionaries stay, so that patches see new values.
        chosen: family name to its last `Choice`, of those that are off again too: what they did stays evidence."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.groups: dict[str, list[Group]] = {}
        self.members: dict[str, tuple[Group, Member]] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.selection: Selection = NOTHING
        self.chosen: dict[str, Choice] = {}

    def activate(self, selection: Selection, arm: bool = True) -> None:
        """Make ``selection`` what is on: undo the families that left, hook or arm those that joined.

        With ``arm`` False modules that are loaded are left to `sweep`, so that no code of a patch runs here."""
        with self._lock:
            before, after = set(self.selection.choices), set(selection.choices)
            self.selection = selection
            self.chosen.update(selection.choices)
            for family in self._order():
                self.options.setdefault(family, {}).update(selection.choices[family].options)
                if family not in self.groups:
                    self.groups[family] = groups_of(registry.family(family))
                    self.members.update((m.patch.id, (g, m)) for g in self.groups[family] for m in g.members)
            joined = [g for family in self._order() if family not in before for g in self.groups[family]]
            left = [group for family in before - after for group in self.groups[family]]
            for group in joined:
                group.checked, group.refusal = False, None
                for member in group.members:
                    member.state, member.error = WAITING, None
                    member.counter.reset()
        for group in left:
            self._undo(group, DISABLED)
            group.remove_guards()
            self._refuse_dependants(group)
        for group in joined:
            self._hook(group, loaded_too=True, arm=arm)
        if selection.choices:
            ledger.boot()
        changes.report()

    def sweep(self) -> None:
        """Arm members that are due and were missed, such as in a module that another thread was importing."""
        for group in self.active():
            self._hook(group, loaded_too=True)

    def after_fork(self) -> None:
        """Reset locks and unfinished work in a forked child, which has none of the parent's other threads."""
        self._lock = threading.RLock()
        for _, member in self.members.values():
            member.busy = False

    def active(self) -> Iterator[Group]:
        """Return the groups of the families that are on, in the order in which they are armed."""
        for family in self._order():
            yield from self.groups.get(family, ())

    def _order(self) -> list[str]:
        """Return the families that are on: built-in ones in the order of the index, others after them by name."""
        places = {family: place for place, family in enumerate(index.families())}
        return sorted(self.selection.choices, key=lambda family: (places.get(family, len(places)), family))

    def _hook(self, group: Group, loaded_too: bool = False, arm: bool = True) -> None:
        """Have the group looked at when one of its modules is ready, and now, unless ``arm`` is False, for those that are loaded."""
        for name in dict.fromkeys(group.modules()):
            if not arm and is_ready(name):
                continue
            if name not in group.hooked or (loaded_too and name in sys.modules):
                group.hooked.add(name)
                when_ready(name, partial(self._on_module, group))

    def _on_module(self, group: Group, module: ModuleType) -> None:
        """Handle an import hook; whether the family is still on is read now.

        A module of a package that is not installed is a stand-in: verl puts one for vLLM into ``sys.modules``."""
        if not self._wanted(group) or contract.installed_root(module.__name__.partition(".")[0]) is None:
            return
        for before in itertools.takewhile(lambda other: other is not group, list(self.active())):
            if module.__name__ in before.modules():  # it may have been switched on later
                self._on_module(before, module)
        for one in self.groups[group.family.name]:  # of another generation none may ever be imported
            if one.base_framework == group.base_framework:
                self._check(one)
        self._hook(group)
        for member in group.members:
            if member.target and module_of(member.target) == module.__name__:
                self._arm(group, member, module)

    def _check(self, group: Group) -> None:
        """Check all members from source; refuse the group if one of them cannot be armed."""
        with self._lock:
            if group.checked or group.checking:
                return
            group.checking = True
            with source.without_collector():
                try:
                    root_for = functools.cache(contract.installed_root)
                    other = other_generation(group.family.patches, group.framework, root_for)
                    if other is not None:
                        said = f"those of {other}, which are for the installed version"
                        for member in group.members:
                            member.state = State("superseded", said)
                        return
                    states = [(member, self._examine(group, member, root_for)) for member in group.members]
                finally:
                    group.checking, group.checked = False, True
                    source.forget()
        problems = [(member, state) for member, state in states if state is not None]
        if problems:
            self._refuse(group, problems)

    def _examine(self, group: Group, member: Member, root_for: RootFor) -> State | None:
        """Why a member cannot be armed, as the state it is left in; None when it can."""
        try:
            found = examine(member.patch, root_for)
        except Exception as error:  # a malformed record, say; the import goes on
            log.error("%s cannot be checked", member.patch.id, exc_info=error)
            member.error = f"{type(error).__name__}: {error}"
            return State("failed", member.error)
        member.target, member.installed = found.target, found.installed
        problem = found.problem or self._incompatible(group, member)
        return State("skipped", problem) if problem else None

    def _incompatible(self, group: Group, member: Member) -> str | None:
        """Return how another patch conflicts with this member."""
        for need in member.patch.needs:
            other, _ = self.members.get(need, (None, None))
            if other is None or not self._wanted(other):
                return f"needs {need}, which is not enabled"
            self._check(other)
            if other.refusal is not None:
                return f"needs {need}, which is refused"
        for other, rival in self.members.values():
            if other is not group and self._wanted(other) and other.refusal is None:
                declared = rival.patch.id in member.patch.conflicts
                if declared or (other.checked and member.patch.id in rival.patch.conflicts):
                    return f"conflicts with {rival.patch.id}, which is enabled"
        return None

    def _arm(self, group: Group, member: Member, module: ModuleType) -> None:
        with self._lock:
            if member.busy or member.state is not WAITING or group.refusal or not self._wanted(group):
                return
            member.busy = True
        try:
            state = self._apply(member, module)
        finally:
            member.busy = False
        with self._lock:
            member.state = state
            unwanted = group.refusal is not None or not self._wanted(group)
        if unwanted:
            self._undo(group, DISABLED if group.refusal is None else _taken_along(group.refusal))
        elif state.word not in ("installed", "superseded"):
            self._refuse(group, [(member, state)])
        else:
            log.info("%s %s on %s (%s)", member.patch.id, state.word, member.target, member.installed)
            changes.report()

    def _apply(self, member: Member, module: ModuleType) -> State:
        patch = member.patch
        options = MappingProxyType(self.options[patch.family])
        try:
            if member.site is None or not member.site.lingers():
                member.site = Site(patch, member.target, module, options, member.counter)
            try:
                by = patch.native(member.site)
            except Exception as error:  # a framework's, when it is asked, says nothing: so the patch acts
                by = None
                log.warning("%s may not be needed: %s: %s", patch.id, type(error).__name__, error)
            if by is not None:
                return State("superseded", by)
            patch.apply(member.site)
        except Owned as owner:
            return State("skipped", f"owned by {owner}")
        except Exception as error:  # a patch's own code: whatever it raises, the import goes on
            log.error("%s cannot be applied", patch.id, exc_info=error)
            member.error = f"{type(error).__name__}: {error}"
            if member.site is not None:
                member.site.unwrap()
            return State("failed", member.error)
        return State("installed")

    def _refuse(self, group: Group, culprits: list[tuple[Member, State]]) -> None:
        first, state = culprits[0]
        with self._lock:
            if group.refusal is not None:
                return
            group.refusal = PatchError(
                f"cannot be armed: {state}.",
                patch=first.patch.id,
                target=first.target or first.patch.targets[0],
                version=str(first.installed) if first.installed else None,
                advice=f"No patch of {group.family.name!r} acts on {group.framework} until that is resolved: "
                f"`flashpatch doctor` names the command. To go on without, switch {group.family.name!r} off.",
            )
        self._undo(group, _taken_along(group.refusal))
        for member, own in culprits:
            member.state = own
        log.warning("%s", group.refusal)
        for target in group.guarded(self.selection.strict):
            when_ready(module_of(target), partial(self._guard, group, target))
        self._refuse_dependants(group)
        changes.report()

    def _refuse_dependants(self, group: Group) -> None:
        ids = {member.patch.id for member in group.members}
        for other in self.active():
            for member in other.members if other.checked and other.refusal is None else ():
                missing = ids.intersection(member.patch.needs)
                if other is not group and missing:
                    why = f"needs {min(missing)}, which is {'refused' if group.refusal else 'not enabled'}"
                    self._refuse(other, [(member, State("skipped", why))])
                    break

    def _undo(self, group: Group, state: State) -> None:
        """Undo the members that are installed, last first, and leave all of them in ``state``."""
        for member in reversed(group.members):
            with self._lock:
                installed, member.state = member.state.word == "installed", state
            if not installed or member.site is None:
                continue
            try:
                member.patch.undo(member.site)
            except Exception as error:  # the other members must be undone all the same
                log.error("%s cannot be undone", member.patch.id, exc_info=error)
                member.error = f"undo: {type(error).__name__}: {error}"
                member.state = State("failed", member.error)

    def _guard(self, group: Group, target: str, module: ModuleType) -> None:
        if self._wanted(group) and group.refusal is not None:
            group.guard(target, module)

    def _wanted(self, group: Group) -> bool:
        return group.family.name in self.selection.choices


def _taken_along(refusal: PatchError) -> State:
    return State("skipped", f"family: {refusal.patch} failed")
