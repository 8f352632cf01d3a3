"""The patch record: what a patch is, written down as data plus three functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flashpatch.tested_versions import TestedVersions

if TYPE_CHECKING:
    from flashpatch.arming.site import Site

StateWord = Literal[
    "disabled", "waiting", "skipped", "superseded", "installed", "live", "displaced", "failed"
]
Evidence = Literal["install", "update", "step", "fault"]
Role = Literal["driver", "engine-core", "worker", "trainer"]


@dataclass(frozen=True)
class State:
    """One word, and the detail that goes with it: ``skipped`` why, ``displaced`` by whom, and so on."""

    word: StateWord
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.word}({self.detail})" if self.detail else self.word


@dataclass(frozen=True)
class Contract:
    """What a patch relies on, checkable from the framework's source alone.

    Attributes:
        params: parameter names the target must still accept (any order, any kind).
        exists: other definitions the patch uses, as ``"package.module:Qual.name"``; all must be there.
        mentions: names or dotted attributes the body of the target must still contain, such as
            ``"self.model_runner"``: evidence that the hooked place still does what the patch assumes.
        fingerprints: version to digest of the target's normalised syntax tree, where a patch was proven
            against an exact text; a digest that differs is reported as drift only for a listed version.
    """

    params: tuple[str, ...] = ()
    exists: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    fingerprints: Mapping[str, str] = field(default_factory=dict)


def _wrap(site: Site) -> None:
    site.wrap(site.patch.wrapper)


def _unwrap(site: Site) -> None:
    site.unwrap()


def _no_native(site: Site) -> str | None:
    return None


@dataclass(frozen=True)
class Patch:
    """One change to one framework object.

    Attributes:
        id: ``family.framework.what``.
        targets: candidate places, newest first, as ``"package.module:Qual.name"``; the first that exists wins.
        requires: requirement on the framework, e.g. ``"vllm>=0.28"``; prereleases match.
        wrapper: ``wrapper(original, *args, **kwargs)`` called instead of the target; for a method
            ``args[0]`` is ``self``. None for a patch that brings its own ``apply`` and ``undo``.
        contract: see `Contract`.
        evidence: when proof of life is due: at ``install``, per ``update``, per ``step``, or only on a
            ``fault`` (such a patch is healthy while never called).
        scope: process roles the patch acts in.
        needs: ids of patches that must be armed too.
        conflicts: ids of patches, names of distributions, or names of modules (excluding once they have been
            imported), that exclude this one.
        tested: exact framework versions the patch's tests ran on; where the record gives none, those that
            ``patches/tested.toml`` has for its family and framework.
        why, how, upstream, remove_when: the documentation, as data.
        apply, undo: install and restore.
        native: answers "does the framework already do this, correctly?" with the name of what does,
            or None; then the patch stands aside as ``superseded``.
        probe: proves by behaviour that the patch is live; see `flashpatch.verify`. None where the
            family's own probe covers it.
    """

    id: str
    targets: tuple[str, ...]
    requires: str
    why: str
    how: str
    remove_when: str
    upstream: str = ""
    wrapper: Callable[..., Any] | None = None
    contract: Contract = Contract()
    evidence: Evidence = "step"
    scope: frozenset[Role] = frozenset()
    needs: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    tested: tuple[str, ...] = TestedVersions()
    apply: Callable[[Site], None] = _wrap
    undo: Callable[[Site], None] = _unwrap
    native: Callable[[Site], str | None] = _no_native
    probe: Callable[..., Any] | None = None

    @property
    def family(self) -> str:
        return self.id.split(".")[0]

    @property
    def framework(self) -> str:
        return self.id.split(".")[1]

    def __post_init__(self) -> None:
        if self.id.count(".") < 2:
            raise ValueError(f"patch id {self.id!r} is not of the form family.framework.what")
        for target in self.targets:
            if target.count(":") != 1:
                raise ValueError(f"{self.id}: target {target!r} is not of the form package.module:Qual.name")
        if self.wrapper is None and self.apply is _wrap:
            raise ValueError(f"{self.id}: give a wrapper, or apply and undo of its own")


@dataclass(frozen=True)
class Option:
    """One option of a family.

    Attributes:
        default: value when nobody set it.
        help: one sentence.
        choices: allowed values, or empty for any value of the default's type.
        kind: type the value must have (``str``, ``bool``, ``int``, ``float``, ``list``).
        items: what a list holds: ``str``, or ``dict`` for tables, ``[[family.option]]`` in TOML, whose
            content the family checks itself.
    """

    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    kind: type = str
    items: type = str


@dataclass(frozen=True)
class Family:
    """A set of patches that is switched on by name and installs all or nothing per framework.

    Attributes:
        name: the family's name, first part of every member's id.
        summary: one line for lists.
        patches: the members.
        names: names a user may type, each with the options it presets; the family's own name is one of them.
        options: option name to `Option`.
        too_late: returns a sentence when objects the family must see at birth already exist, else None.
        probe: proves by behaviour that the whole family is live; see `flashpatch.verify`.
        refuses: targets, as ``"package.module:Qual.name"``, that raise `PatchError` when called while the
            members for that package are switched on but cannot be armed; such as the engine's constructor,
            when weights are at stake. Without any, strict mode makes the members' own targets raise.
        commands: subcommands of ``flashpatch`` that the family brings: name to the module that holds one, as
            `flashpatch.cli` describes it. Importing that module must import neither torch nor a framework.
    """

    name: str
    summary: str
    patches: tuple[Patch, ...]
    names: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    too_late: Callable[[], str | None] | None = None
    probe: Callable[..., Any] | None = None
    refuses: tuple[str, ...] = ()
    commands: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for patch in self.patches:
            if patch.family != self.name:
                raise ValueError(f"patch {patch.id!r} is not of family {self.name!r}")
