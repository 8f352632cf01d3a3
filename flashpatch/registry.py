"""The families there are: the built-in ones and those that installed packages bring.

A package joins through the entry-point group ``flashpatch.patches``; the entry is the `Family`, or a module
that has one as ``FAMILY``. Code comes from installed packages only, never from the environment or a config.

A built-in family that is asked for by name is imported alone; lists of records and unknown names import all."""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from flashpatch import index
from flashpatch.errors import PatchError, nearest
from flashpatch.record import Family, Patch

log = logging.getLogger("flashpatch")

GROUP = "flashpatch.patches"
BUILT_IN = "flashpatch.patches"
BUILT_IN_COMMANDS = {
    **{name: f"flashpatch.commands.{name}" for name in ("list", "show", "doctor")},
    **{name: f"flashpatch.verify.job.commands.{name}" for name in ("runs", "report", "metrics", "watch")},
}
"""Name of every subcommand that no family brings, to its module."""


def families() -> Mapping[str, Family]:
    """All families by name."""
    return _load()[0]


def built_in() -> Mapping[str, Family]:
    """The built-in families by name."""
    return {name: family for name, family in families().items() if name not in _joined()[0]}


def family(name: str) -> Family:
    """One family by its own name, imported alone if that is possible. KeyError when there is none."""
    found = _load_alone(name) if name in index.families() else _joined()[0].get(name)
    return found if found is not None else families()[name]


def family_keys() -> tuple[str, ...]:
    """Every family's own name; of built-in ones, without importing them."""
    return (*index.families(), *_joined()[0])


def problems() -> Mapping[str, str]:
    """What kept a family from being loaded, by where it was to come from."""
    return _load()[1]


def commands() -> dict[str, str]:
    """Name of every subcommand of ``flashpatch`` to the module that holds it."""
    found = {**BUILT_IN_COMMANDS, **index.merged("commands")}
    for family in _joined()[0].values():
        found.update(family.commands)
    return found


def patches() -> dict[str, Patch]:
    """All patches by id."""
    return {patch.id: patch for family in families().values() for patch in family.patches}


def patch_ids() -> tuple[str, ...]:
    """Every patch's id; of built-in families, without importing them."""
    return (*index.patch_ids(), *(patch.id for family in _joined()[0].values() for patch in family.patches))


def patch(patch_id: str) -> Patch:
    """One patch by id, without importing other families. Raises KeyError when there is none."""
    return {patch.id: patch for patch in family(patch_id.partition(".")[0]).patches}[patch_id]


def names() -> dict[str, Family]:
    """The names a user may type, each with the family it switches on."""
    return {name: family for family in families().values() for name in family_names(family)}


def family_names(family: Family) -> Mapping[str, Mapping[str, Any]]:
    """The names of one family with the options they preset; its own name is always one of them."""
    return {family.name: {}, **family.names}


def family_of(name: str, more: Iterable[str] = ()) -> Family:
    """The family a user's name stands for; ``more``: names that could have been meant too. Raises PatchError, with the known
    names and the nearest, if it is unknown."""
    built_in_family = index.family_of(name)
    if built_in_family is None:
        found = next((joined for joined in _joined()[0].values() if name in family_names(joined)), None)
    else:
        found = _load_alone(built_in_family)
    if found is not None:
        return found
    known = names()
    if name not in known:
        broken = "".join(f" Not loaded: {where}: {why}." for where, why in problems().items())
        raise PatchError(
            f"unknown name {name!r}.", advice=(meant(name) or nearest(name, [*known, *more])) + broken
        )
    return known[name]


def meant(word: str) -> str:
    """Return which names ``word`` is made of, or else which have patches for it, as a question; empty for none."""
    if word.lower() in ("true", "yes", "on", "false", "no", "off"):
        return "FLASHPATCH=1 switches on what flashpatch.toml names, else fp8; FLASHPATCH=0 switches all off."
    known, forks = names(), {"flashrl": "fp8", "fastrl": "eagle", "async-grpo": "grpo"}
    words = [forks.get(one, one) for one in word.lower().replace(",", " ").replace(";", " ").split()]
    if words and known.keys() >= {*words}:
        return f"Write {str(words)[1:-1]}." if "," in word else f"Did you mean {','.join(words)!r}?"
    holders = {id.partition(".")[0] for id in patch_ids() if word.lower() in id.split(".")[1].split("_")}
    found = [name for name, family in known.items() if family.name in holders]
    return f"Did you mean {', '.join(found)}? {word!r} is part of what they change." if found else ""


@functools.cache
def _load_alone(name: str) -> Family | None:
    """A built-in family without the others; None when it has to be looked for among all of them, which says
    what is wrong with it."""
    try:
        found: dict[str, Family] = {}
        _admit(importlib.import_module(f"{BUILT_IN}.{name}"), found, built_in=True)
    except Exception:
        return None
    if name in found and index.is_stale(found[name]):
        log.warning("the index of family %s is not up to date: run python -m flashpatch.write_index", name)
    return found.get(name)


@functools.cache
def _load() -> tuple[dict[str, Family], dict[str, str]]:
    """All families by name, and what kept others from being loaded."""
    found: dict[str, Family] = {}
    wrong: dict[str, str] = {}
    _admit_all(_built_in(), found, wrong, built_in=True)
    joined, wrong_too = _joined()
    return {**found, **joined}, {**wrong, **wrong_too}


@functools.cache
def _joined() -> tuple[dict[str, Family], dict[str, str]]:
    """Families of other packages by name, and what kept some from being loaded."""
    found: dict[str, Family] = {}
    wrong: dict[str, str] = {}
    entries = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    named = ((f"entry point {entry.name} = {entry.value}", entry.load) for entry in entries)
    _admit_all(named, found, wrong, built_in=False)
    return found, wrong


def _admit_all(
    candidates: Iterable[tuple[str, Callable[[], Any]]],
    found: dict[str, Family],
    wrong: dict[str, str],
    built_in: bool,
) -> None:
    for where, load in candidates:
        try:
            _admit(load(), found, built_in=built_in)
        except Exception as error:  # whatever a broken family raises must not take the others along
            wrong[where] = f"{type(error).__name__}: {error}"
            log.error("patch family of %s is not available: %s", where, wrong[where], exc_info=error)


def _built_in() -> Iterator[tuple[str, Callable[[], Any]]]:
    package = importlib.import_module(BUILT_IN)
    modules = pkgutil.iter_modules(package.__path__)
    folders = [info.name for info in modules if info.ispkg and not info.name.startswith("_")]
    for name in sorted(folders, key=(*package.ORDER, *folders).index):
        yield f"{BUILT_IN}.{name}", functools.partial(importlib.import_module, f"{BUILT_IN}.{name}")


def _admit(candidate: Any, found: dict[str, Family], *, built_in: bool = False) -> None:
    """Add a family to ``found``; ValueError says why it cannot be added.

    What built-in families have is taken, whether or not they are imported."""
    family = candidate if isinstance(candidate, Family) else getattr(candidate, "FAMILY", None)
    if not isinstance(family, Family):
        raise ValueError(f"{candidate!r} is no Family and has no FAMILY")
    taken, commands = ({} if built_in else index.owners(part) for part in ("names", "commands"))
    for other in found.values():
        taken.update(dict.fromkeys(family_names(other), other.name))
        commands.update(dict.fromkeys(other.commands, other.name))
    for name in family_names(family):
        if name in taken:
            raise ValueError(f"name {name!r} is taken by family {taken[name]!r}")
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
