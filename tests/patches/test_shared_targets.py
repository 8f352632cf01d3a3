"""Functions of frameworks that more than one patch wraps: each is listed with the order of its wrappers and why that is right.

Families are armed in one order (`flashpatch.patches.ORDER`), however they were typed, and the patches of a family in the order
that it lists them: the last is outermost, and runs first. A second wrapper of a function that is not listed fails here: use a door
of `patches/_shared`, or list it with a reason in `shared_targets.toml`."""

import pkgutil
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flashpatch import index, patches, registry
from flashpatch.record import Patch


class Listed(NamedTuple):
    """The patches that wrap a function, innermost first, and why no other order is needed.

    ``older`` are those for an older generation of the framework, which are never on beside the others."""

    wrappers: tuple[str, ...]
    why: str
    older: tuple[str, ...] = ()


SHARED: Mapping[str, Listed] = {
    target: Listed(tuple(one["wrappers"]), one["why"], tuple(one.get("older", ())))
    for target, one in tomllib.loads(Path(__file__).with_name("shared_targets.toml").read_text()).items()
}


def _generation(patch: Patch) -> str:
    """Return the SGLang that a patch is for: those of older ones are never on beside newer ones."""
    found = re.search(r"_\d+_\d+(_\d+)?$", patch.id.split(".")[1])
    return found[0] if found else ""


def wrapped() -> dict[str, set[tuple[str, ...]]]:
    """Return the functions that several patches wrap in one process, with these patches, innermost first."""
    found: dict[str, dict[str, list[str]]] = {}
    for family in patches.ORDER:
        for patch in registry.family(family).patches:
            for target in patch.targets:
                for one in [_generation(patch)] if patch.framework != "verl" else [""]:
                    found.setdefault(target, {}).setdefault(one, []).append(patch.id)
    return {
        target: several
        for target, ways in found.items()
        if (several := {tuple(ids) for ids in ways.values() if len(ids) > 1})
    }


def test_each_function_with_several_wrappers_is_listed_in_the_order_of_arming() -> None:
    assert wrapped() == {t: {listed.wrappers, listed.older} - {()} for t, listed in SHARED.items()}
    assert all(listed.why for listed in SHARED.values())


def test_each_family_has_its_place() -> None:
    folders = {module.name for module in pkgutil.iter_modules(patches.__path__) if module.name[0] != "_"}
    assert set(patches.ORDER) == folders and len(patches.ORDER) == len(folders)
    assert index.families() == patches.ORDER
