"""The families there are: the built-in ones and those that installed packages bring.

A package joins through the entry-point group ``flashpatch.patches``; the entry is the `Family`, or a module
that has one as ``FAMILY``. Code comes from installed packages only, never from the environment or a config.

A built-in family that is asked for by name is imported alone; all of them are imported for lists of all, and to
look for a name that the index does not have.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from flashpatch import index
from flashpatch.errors import PatchError
from flashpatch.record import Family, Patch
from flashpatch.suggest import nearest

log = logging.getLogger("flashpatch")

GROUP = "flashpatch.patches"
BUILT_IN = "flashpatch.patches"
BUILT_IN_COMMANDS = {
    **{name: f"flashpatch.commands.{name}" for name in ("list", "show", "env", "status", "migrate")},
    **{name: f"flashpatch.verify.job.commands.{name}" for name in ("report", "trace", "metrics", "watch")},
}
"""Name of every subcommand that no family brings, to its module."""


def families() -> Mapping[str, Family]:
    """All families by name."""
    return _load()[0]


def built_in() -> Mapping[str, Family]:
    """The built-in families by name."""
    homes = _load()[2]
    return {name: family for name, family in families().items() if homes[name].startswith(f"{BUILT_IN}.")}


def family(name: str) -> Family:
    """One family by its own name, imported alone where that is possible. KeyError when there is none."""
    found = _load_alone(name) if name in index.families() else None
    return found if found is not None else families()[name]


def is_family(name: str) -> bool:
    """Whether a family has this name, others that stand for it left out."""
    alone = name in index.families() and _load_alone(name) is not None
    return alone or name in families()


def problems() -> Mapping[str, str]:
    """What kept a family from being loaded, by where it was to come from."""
    return _load()[1]


def migrations() -> dict[str, str]:
    """Name of every research fork whose settings a family takes over, to the module that does it, by name."""
    return dict(sorted(item for family in families().values() for item in family.migrations.items()))


def patches() -> dict[str, Patch]:
    """All patches by id."""
    return {patch.id: patch for family in families().values() for patch in family.patches}


def patch(patch_id: str) -> Patch:
    """One patch by id, without importing other families. Raises KeyError when there is none."""
    return {patch.id: patch for patch in family(patch_id.partition(".")[0]).patches}[patch_id]


def names() -> dict[str, Family]:
    """The names a user may type, each with the family it switches on."""
    return {name: family for family in families().values() for name in family_names(family)}


def family_names(family: Family) -> Mapping[str, Mapping[str, Any]]:
    """The names of one family with the options they preset; its own name is always one of them."""
    return {family.name: {}, **family.names}


def family_of(name: str) -> Family:
    """The family a user's name stands for.

    Raises:
        PatchError: nobody knows the name; the message lists the known ones and the nearest.
    """
    built_in_family = index.family_of(name)
    if built_in_family is not None and (found := _load_alone(built_in_family)) is not None:
        return found
    known = names()
    if name not in known:
        broken = "".join(f" Not loaded: {where}: {why}." for where, why in problems().items())
        raise PatchError(f"unknown name {name!r}.", advice=nearest(name, known) + broken)
    return known[name]


@functools.cache
def _load_alone(name: str) -> Family | None:
    """A built-in family without the others; None when it has to be looked for among all of them, which says
    what is wrong with it."""
    try:
        found: dict[str, Family] = {}
        _admit(importlib.import_module(f"{BUILT_IN}.{name}"), found)
    except Exception:
        return None
    if name in found and index.is_stale(found[name]):
        log.warning("the index of family %s is not up to date: run python -m flashpatch.index", name)
    return found.get(name)


@functools.cache
def _load() -> tuple[dict[str, Family], dict[str, str], dict[str, str]]:
    found: dict[str, Family] = {}
    wrong: dict[str, str] = {}
    homes: dict[str, str] = {}
    for where, load in (*_built_in(), *_joined()):
        try:
            homes[_admit(load(), found)] = where
        except Exception as error:  # whatever a broken family raises must not take the others along
            wrong[where] = f"{type(error).__name__}: {error}"
            log.error("patch family of %s is not available: %s", where, wrong[where], exc_info=error)
    return found, wrong, homes


def _built_in() -> Iterator[tuple[str, Callable[[], Any]]]:
    try:
        package = importlib.import_module(BUILT_IN)
    except ModuleNotFoundError as error:
        if error.name != BUILT_IN:
            raise
        return
    for info in pkgutil.iter_modules(package.__path__, f"{BUILT_IN}."):
        if info.ispkg and not info.name.rpartition(".")[2].startswith("_"):
            yield info.name, functools.partial(importlib.import_module, info.name)


def _joined() -> Iterator[tuple[str, Callable[[], Any]]]:
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        yield f"entry point {entry.name} = {entry.value}", entry.load


def _admit(candidate: Any, found: dict[str, Family]) -> str:
    """Add a family to ``found`` and return its name; ValueError says why it cannot be added."""
    family = candidate if isinstance(candidate, Family) else getattr(candidate, "FAMILY", None)
    if not isinstance(family, Family):
        raise ValueError(f"{candidate!r} is no Family and has no FAMILY")
    taken = {name: other.name for other in found.values() for name in family_names(other)}
    for name in family_names(family):
        if name in taken:
            raise ValueError(f"name {name!r} is taken by family {taken[name]!r}")
    commands = {name: other.name for other in found.values() for name in other.commands}
    for name in family.commands:
        if name in BUILT_IN_COMMANDS or name in commands:
            raise ValueError(f"command {name!r} is taken by {commands.get(name, 'flashpatch itself')!r}")
    forks = {name: other.name for other in found.values() for name in other.migrations}
    for name in family.migrations:
        if name in forks:
            raise ValueError(f"the settings of {name!r} are taken over by {forks[name]!r} already")
    for patch in family.patches:
        if not patch.targets:
            raise ValueError(f"patch {patch.id!r} has no target")
        for target in patch.targets:
            if "." not in target.partition(":")[0]:
                raise ValueError(f"patch {patch.id!r}: {target!r} names a package root, not a submodule")
    found[family.name] = family
    return family.name
