"""Run ``flashpatch list``: print every name and whether it fits the installed frameworks, or the patches of one."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from flashpatch import registry
from flashpatch.commands import provenance
from flashpatch.commands.catalogue import Entry, entries
from flashpatch.commands.report import Table, emit
from flashpatch.patch_status import absent_frameworks
from flashpatch.record import Family
from flashpatch.settings import selections

HELP = "every name, or the patches of one, and whether they fit the installed frameworks"
_NAMES = ("name", "installed", "patches", "state", "does")
_COLUMNS = ("patch", "requires", "installed", "contract", "tested", "state")
_TESTED = {True: "tested", False: "untested", None: ""}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name whose patches to list."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="list the patches of this name")


def run(args: argparse.Namespace) -> int:
    """Print the list; return 1 when an enabled patch does not fit an installed framework, or a family failed to
    load, which the registry has logged."""
    chosen, found = registry.family_of(args.name) if args.name else None, entries()
    if chosen is not None:
        found = [entry for entry in found if entry.patch.family == chosen.name]
        title = f"{chosen.name}: {chosen.summary} (names: {', '.join(registry.family_names(chosen))})"
        absent = absent_frameworks(entry.patch.id for entry in found if not entry.version)
        table = Table(title, _COLUMNS, [_row(entry) for entry in found if entry.version], notes=absent)
    else:
        with provenance.environment():
            on = selections.from_environment(selections.NOTHING).names
        names = [_name_row(name, family, found, on) for name, family in registry.names().items()]
        table = Table("Names", _NAMES, names, notes=["flashpatch list NAME: its patches"])
    broken = registry.problems()
    emit({"patches": [_data(entry) for entry in found], "problems": dict(broken)}, [table], args.json)
    unfit = any(entry.state.word == "skipped" and entry.version for entry in found)
    return int(unfit or bool(broken))


def _name_row(name: str, family: Family, found: list[Entry], on: Collection[str]) -> tuple[str, ...]:
    here = [entry for entry in found if entry.patch.family == family.name and entry.version]
    states = {
        entry.state.word: str(entry.state) for entry in here if not entry.state.detail.startswith("family: ")
    }
    word = next((states[word] for word in ("skipped", "waiting", "superseded") if word in states), "disabled")
    fit = sum(entry.findings.problem is None for entry in here)
    installed = ", ".join(dict.fromkeys(entry.version for entry in here)) or "-"
    state = "disabled" if name not in on else word if here else "not installed"
    return name, installed, f"{fit} of {len(here)} fit" if here else "-", state, family.summary


def _row(entry: Entry) -> tuple[str, ...]:
    patch = entry.patch
    return patch.id, patch.requires, entry.version, entry.contract, _TESTED[entry.tested], str(entry.state)


def _data(entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.patch.id,
        "family": entry.patch.family,
        "framework": entry.patch.framework,
        "requires": entry.patch.requires,
        "installed": entry.version or None,
        "target": entry.findings.target or None,
        "contract": entry.contract,
        "tested": entry.tested,
        "state": entry.state.word,
        "detail": entry.state.detail,
    }
