"""Run ``flashpatch list``: print every patch and whether it fits the installed frameworks."""

from __future__ import annotations

import argparse
from typing import Any

from flashpatch import registry
from flashpatch.commands.catalogue import Entry, entries
from flashpatch.commands.report import Table, emit
from flashpatch.patch_status import absent_frameworks

HELP = "every patch, and whether it fits the installed framework"
_COLUMNS = ("patch", "requires", "installed", "contract", "tested", "state")
_TESTED = {True: "tested", False: "untested", None: ""}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: ``--json`` is common to all commands."""


def run(args: argparse.Namespace) -> int:
    """Print the list; return 1 when an enabled patch does not fit an installed framework, or a family failed to
    load, which the registry has logged."""
    found = entries()
    tables = []
    for family in registry.families().values():
        title = f"{family.name}: {family.summary} (names: {', '.join(registry.family_names(family))})"
        members = [entry for entry in found if entry.patch.family == family.name]
        rows = [_row(entry) for entry in members if entry.version]
        absent = absent_frameworks(entry.patch.id for entry in members if not entry.version)
        tables.append(Table(title, _COLUMNS, rows, notes=absent))
    broken = registry.problems()
    data = {"patches": [_data(entry) for entry in found], "problems": dict(broken)}
    emit(data, tables or [Table("patches", _COLUMNS, [])], args.json)
    unfit = any(entry.state.word == "skipped" and entry.version for entry in found)
    return int(unfit or bool(broken))


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
