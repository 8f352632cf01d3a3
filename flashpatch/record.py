"""Describe a patch as data: what it changes, on which versions, why, and when it must be live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from flashpatch import conditions
from flashpatch.index import Option

if TYPE_CHECKING:
    from flashpatch.arming.site import Site


class TestedVersions:
    """The field ``tested`` of a `Patch`: what its record gives, else the family's versions from the file.

    The file is read when a record without versions of its own is first asked for them. A record that gives an empty
    tuple was tested on none, whatever its family was."""

    __test__ = False  # for pytest: not a class of tests

    def __get__(self, patch: Patch | None, owner: type | None = None) -> tuple[str, ...] | None:
        if patch is None:  # asked by dataclass for the default
            return None
        if (given := vars(patch)["tested"]) is not None:
            return given
        return tuple(_tested_versions().get(patch.family, {}).get(patch.framework, ()))

    def __set__(self, patch: Patch, versions: tuple[str, ...] | None) -> None:
        vars(patch)["tested"] = versions


@cache
def _tested_versions() -> dict[str, dict[str, list[str]]]:
    import tomllib
    from importlib import import_module
    from pathlib import Path

    path = Path(import_module("flashpatch.patches").__path__[0]) / "tested.toml"
    with path.open("rb") as file:
        return tomllib.load(file)


StateWord = Literal[
    "disabled", "waiting", "skipped", "superseded", "installed", "live", "displaced", "failed"
]
Evidence = Literal["install", "update", "step", "fault", "optional"]
Role = Literal["driver", "engine-core", "worker", "trainer"]

WHEN_DUE: Mapping[Evidence, str] = {
    "install": "once the process acts in the patch's scope",
    "update": "once weights were updated",
    "step": "once a step was taken",
    "fault": "only on a fault",
    "optional": "only if this path is taken; another one may be",
}
"""By ``evidence``: when a patch must have been observed live; completes a sentence that begins with "due"."""


@dataclass(frozen=True)
class State:
    """Hold a patch's state: one word, and its detail, such as why ``skipped`` or by whom ``displaced``."""

    word: StateWord
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.word}({self.detail})" if self.detail else self.word


@dataclass(frozen=True)
class Contract:
    """List what a patch relies on in the framework, so that it can be checked from source alone.

    Attributes:
        params: parameter names the target must still accept (any order, any kind).
        exists: other definitions the patch uses, as ``"package.module:Qual.name"``; all must be there.
        since: the same for definitions that older supported versions have not: the first version that must have
            them to their names. The patch does without them before.
        mentions: names or dotted attributes the body of the target must still contain, such as
            ``"self.model_runner"``: evidence that the hooked place still does what the patch assumes."""

    params: tuple[str, ...] = ()
    exists: tuple[str, ...] = ()
    since: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mentions: tuple[str, ...] = ()


def _wrap(site: Site) -> None:
    assert site.patch.wrapper is not None  # see `Patch.__post_init__`
    site.wrap(site.patch.wrapper)


@dataclass(frozen=True)
class Patch:
    """Record one change to one framework object.

    Attributes:
        id: ``family.framework.what``.
        targets: candidates, newest first, as ``"package.module:Qual.name"``; the first one found is used.
        requires: requirement on the framework, e.g. ``"vllm>=0.24"``; prereleases match.
        beside: requirement on a further distribution that must be installed too, e.g. ``"sglang>=0.5.21"``.
        wrapper: ``wrapper(original, *args, **kwargs)`` called instead of the target; for a method
            ``args[0]`` is ``self``. None for a patch that brings its own ``apply`` and ``undo``.
        contract: see `Contract`.
        evidence: when the patch must have been observed live: at ``install``, after the first ``update``
            of weights or the first ``step``; or never, so that it is healthy while never called, because it
            acts only on a ``fault`` (a failure path), or because it is ``optional`` (the framework may take
            another path, such as a second model runner or another way to update weights).
        when: what else must hold for the evidence to be due, see `flashpatch.conditions`; with ``optional`` it alone
            says when the path is taken.
        one_of: ids of patches of the same framework; a call of one of them is evidence enough for this one too.
        scope: process roles the patch acts in.
        needs: ids of patches that must be armed too.
        conflicts: ids of patches, names of distributions, or names of modules (excluding once they have been
            imported), that exclude this one.
        tested: exact framework versions the patch's tests ran on, without local labels (``+cpu``); if the record says nothing, those that
            ``patches/tested.toml`` has for its family and framework.
        why, how, upstream, remove_when: the documentation, as data.
        apply, undo: install and restore.
        native: answers "does the framework already do this, correctly?" with the name of what does,
            or None; then the patch is not applied and its state is ``superseded``. An exception counts as None."""

    id: str
    targets: tuple[str, ...]
    requires: str
    why: str
    how: str
    remove_when: str
    upstream: str = ""
    beside: str = ""
    wrapper: Callable[..., Any] | None = None
    contract: Contract = Contract()
    evidence: Evidence = "step"
    when: str = ""
    one_of: tuple[str, ...] = ()
    scope: frozenset[Role] = frozenset()
    needs: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    tested: tuple[str, ...] = TestedVersions()  # type: ignore[assignment]  # a descriptor
    apply: Callable[[Site], None] = _wrap
    undo: Callable[[Site], None] = lambda site: site.unwrap()
    native: Callable[[Site], str | None] = lambda site: None

    @property
    def family(self) -> str:
        return self.id.split(".")[0]

    @property
    def framework(self) -> str:
        return self.id.split(".")[1]

    @property
    def base_framework(self) -> str:
        """The framework without a version: ``sglang`` and ``sglang_0_5_12`` are for the same one, of two generations."""
        return self.framework.rstrip("_0123456789")

    def tested_on(self, version: str) -> bool:
        """Whether the tests ran on ``version``; a local label such as ``+cpu`` is another build of the same version."""
        return version.partition("+")[0] in self.tested

    def __post_init__(self) -> None:
        if self.id.count(".") < 2:
            raise ValueError(f"patch id {self.id!r} is not of the form family.framework.what")
        for target in self.targets:
            if target.count(":") != 1:
                raise ValueError(f"{self.id}: target {target!r} is not of the form package.module:Qual.name")
        if self.evidence not in WHEN_DUE:
            raise ValueError(f"{self.id}: evidence {self.evidence!r} is none of {', '.join(WHEN_DUE)}")
        if unknown := self.scope - set(get_args(Role)):
            raise ValueError(f"{self.id}: no process has the role {', '.join(sorted(unknown))}")
        if self.when and self.evidence == "fault":
            raise ValueError(f"{self.id}: what acts on faults alone is never due, so `when` says nothing")
        conditions.parse(self.when)
        if self.wrapper is None and self.apply is _wrap:
            raise ValueError(f"{self.id}: give a wrapper, or apply and undo of its own")


@dataclass(frozen=True)
class Family:
    """Group patches that are switched on by one name and installed all or none per framework.

    Attributes:
        name: the family's name, first part of every member's id.
        summary: one line for lists.
        patches: the members.
        names: names a user may type, each with the options it presets; the family's own name is one of them.
        options: option name to `Option`.
        too_late: returns a sentence when objects exist that had to be created after enabling, else None.
        probe: proves by behaviour that the whole family is live; see `flashpatch.verify`.
        refuses: targets, as ``"package.module:Qual.name"``, that raise `PatchError` when called while the
            members for that package are switched on but cannot be armed; such as the engine's constructor,
            when weights are at stake. Without any, strict mode makes the members' own targets raise.
        not_on: package to those of the names that are refused there.
        commands: subcommands of ``flashpatch`` that the family brings: name to the module that holds one, as
            `flashpatch.cli` describes it. Importing that module must import neither torch nor a framework.
        about: name to a line for lists, for those of which ``summary`` does not say enough."""

    name: str
    summary: str
    patches: tuple[Patch, ...]
    names: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    too_late: Callable[[], str | None] | None = None
    probe: Callable[..., Any] | None = None
    refuses: tuple[str, ...] = ()
    not_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = [patch.id for patch in self.patches]
        if twice := {id for id in ids if ids.count(id) > 1}:
            raise ValueError(f"two patches are called {', '.join(sorted(twice))}")
        for patch in self.patches:
            if patch.family != self.name:
                raise ValueError(f"patch {patch.id!r} is not of family {self.name!r}")
            if unknown := set(conditions.options(patch.when)) - set(self.options):
                raise ValueError(
                    f"patch {patch.id!r}: {self.name} has no option {', '.join(sorted(unknown))}"
                )
