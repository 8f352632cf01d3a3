"""Group the patches of one family for one framework, which are armed all or none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from flashpatch import ledger
from flashpatch.arming.call_counter import CallCounter
from flashpatch.arming.preflight import module_of, packages
from flashpatch.arming.site import Owned, Site
from flashpatch.contracts.versions import Installed
from flashpatch.errors import PatchError
from flashpatch.log import log
from flashpatch.record import Family, Patch, State

WAITING = State("waiting")
DISABLED = State("disabled")


@dataclass(eq=False)
class Member:
    """Hold one patch's state in this process.

    Attributes:
        patch: the record.
        counter: its calls, over all its sites.
        state: as far as the engine's own actions determine it; see `observed`.
        target: the target chosen for the installed version, or empty.
        installed: the distribution the target belongs to, if known.
        site: where it is applied; kept after an undo for as long as a wrapper of other code sits on top.
        busy: one thread is applying it.
        error: its last error."""

    patch: Patch
    counter: CallCounter
    state: State = DISABLED
    target: str = ""
    installed: Installed | None = None
    site: Site | None = None
    busy: bool = False
    error: str | None = None

    def observed(self) -> State:
        """Return the observed state: ``live`` once called, ``displaced`` under another tool's wrapper."""
        if self.site is not None and self.state.word in ("installed", "disabled", "skipped", "failed"):
            by = self.site.displaced_by()
            if by is not None:
                return State("displaced", by)
        if self.state.word == "installed" and (calls := self.counter.calls()):
            return State("live", f"{calls} call{'' if calls == 1 else 's'}")
        return self.state


@dataclass(eq=False)
class Group:
    """Hold the members of ``family`` for ``framework``.

    Attributes:
        checked: versions and contracts of all members were checked since the family was switched on.
        checking: that check is under way, in the thread that holds the manager's lock.
        refusal: why none of the members may act, once one of them cannot.
        hooked: modules with a hook of this group on them; a hook outlives a disable and is then inert.
        guards: sites that raise the refusal when the refused capability is used."""

    family: Family
    framework: str
    members: tuple[Member, ...]
    checked: bool = False
    checking: bool = False
    refusal: PatchError | None = None
    hooked: set[str] = field(default_factory=set)
    guards: list[Site] = field(default_factory=list)

    @property
    def base_framework(self) -> str:
        """The framework without a version, see `Patch.base_framework`."""
        return self.members[0].patch.base_framework

    def modules(self) -> Iterator[str]:
        """Yield the modules whose import may arm a member."""
        for member in self.members:
            for target in (member.target, *member.patch.targets) if member.target else member.patch.targets:
                yield module_of(target)

    def check(self) -> None:
        """Raise the refusal if the group was refused."""
        if self.refusal is not None:
            what = f"{self.family.name} on {self.framework}"
            ledger.event("refused", what=what, problem=self.refusal.problem)
            raise copy.copy(self.refusal)

    def guarded(self, strict: bool) -> tuple[str, ...]:
        """Return the targets that raise while the group is refused: the family's, else in strict mode all."""
        ours = {package for member in self.members for package in packages(member.patch)}
        chosen = tuple(t for t in self.family.refuses if module_of(t).partition(".")[0] in ours)
        if chosen or not strict:
            return chosen
        return tuple(dict.fromkeys(member.target or member.patch.targets[0] for member in self.members))

    def guard(self, target: str, module: ModuleType) -> None:
        """Make ``target`` raise the refusal when called, instead of running without the patch.

        A target that is not there, or that other code owns, stays as it is, which is logged."""

        def refuse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.check()
            return original(*args, **kwargs)

        if any(guard.target == target for guard in self.guards):
            return
        name = f"{self.family.name}.{self.framework}.refusal"
        patch = Patch(name, (target,), requires="", why="", how="", remove_when="", wrapper=refuse)
        try:
            site = Site(patch, target, module)
            site.wrap(refuse)
        except (LookupError, Owned, PatchError) as error:
            log.warning("%s: no guard on %s: %s", name, target, error)
        else:
            self.guards.append(site)

    def remove_guards(self) -> None:
        """Take the guards out again."""
        for guard in self.guards:
            guard.unwrap()
        self.guards.clear()


def groups_of(family: Family) -> list[Group]:
    """Return one group per framework that the family patches."""
    frameworks = dict.fromkeys(patch.framework for patch in family.patches)
    return [
        Group(
            family,
            framework,
            tuple(Member(p, CallCounter(p.id)) for p in family.patches if p.framework == framework),
        )
        for framework in frameworks
    ]
