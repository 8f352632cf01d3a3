"""The families there are: the built-in ones and those that installed packages bring.

A package joins through the entry-point group ``flashpatch.patches``; the entry is the `Family`, or a module
that has one as ``FAMILY``. Code comes from installed packages only, never from the environment or a config.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.record import Family, Patch
from flashpatch.suggest import nearest

log = logging.getLogger("flashpatch")

GROUP = "flashpatch.patches"
BUILT_IN = "flashpatch.patches"
BUILT_IN_COMMANDS = ("list", "show", "env", "status")


def families() -> Mapping[str, Family]:
    """All families by name."""
    return _load()[0]


def problems() -> Mapping[str, str]:
    """What kept a family from being loaded, by where it was to come from."""
    return _load()[1]


def patches() -> dict[str, Patch]:
    """All patches by id."""
    return {patch.id: patch for family in families().values() for patch in family.patches}


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
    known = names()
    if name not in known:
        broken = "".join(f" Not loaded: {where}: {why}." for where, why in problems().items())
        raise PatchError(f"unknown name {name!r}.", advice=nearest(name, known) + broken)
    return known[name]


@functools.cache
def _load() -> tuple[dict[str, Family], dict[str, str]]:
    found: dict[str, Family] = {}
    wrong: dict[str, str] = {}
    for where, load in (*_built_in(), *_joined()):
        try:
            _admit(load(), found)
        except Exception as error:  # whatever a broken family raises must not take the others along
            wrong[where] = f"{type(error).__name__}: {error}"
            log.error("patch family of %s is not available: %s", where, wrong[where], exc_info=error)
    return found, wrong


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


def _admit(candidate: Any, found: dict[str, Family]) -> None:
    """Add a family to ``found``; ValueError says why it cannot be added."""
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
    for patch in family.patches:
        if not patch.targets:
            raise ValueError(f"patch {patch.id!r} has no target")
        for target in patch.targets:
            if "." not in target.partition(":")[0]:
                raise ValueError(f"patch {patch.id!r}: {target!r} names a package root, not a submodule")
    found[family.name] = family
