"""Run ``flashpatch show``: print the whole record of one patch or one family."""

from __future__ import annotations

import argparse
from typing import Any

from flashpatch import registry
from flashpatch.commands.catalogue import Entry, Installation, entries
from flashpatch.commands.report import Table, emit
from flashpatch.errors import closest
from flashpatch.evidence import explain
from flashpatch.record import Family
from flashpatch.settings import options

HELP = "all about one patch, or about a family and its options"

_AS_IT_IS = "id family framework why how upstream remove_when requires beside".split()
"""Parts of a record that stand in the report as they are."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="id of a patch, or name of a family")


def run(args: argparse.Namespace) -> int:
    """Print the record and return 0; an unknown ID is a usage error."""
    families = registry.names()
    entry = next((entry for entry in entries(Installation()) if entry.patch.id == args.id), None)
    if entry is not None:
        data = _patch(entry)
    elif args.id in families:
        data = _family(families[args.id])
    else:
        family = args.id.partition(".")[0]
        where = f" {family}` shows its patches." if family in families else "` shows all names."
        args.usage_error(f"no patch or family {args.id!r}. {_hint(args.id)}`flashpatch list{where}")
    said = data if entry is not None else _said(families[args.id])
    rows = [(field, line) for field, value in said.items() for line in _lines(value) if line != "-"]
    tables = [Table(args.id, ("field", "value"), rows)]
    if entry is None and (known := families[args.id].options):
        title = f"Options, under [{families[args.id].name}] of {options.CONFIG}"
        cells = [options.row(name, option) for name, option in known.items()]
        tables.append(Table(title, ("option", "default", "values", "meaning"), cells))
    emit(data, tables, args.json)
    return 0


def _hint(word: str) -> str:
    """Return what may be meant by ``word``, as a question; empty if nothing is."""
    if names := registry.meant(word):
        return f"{names} "
    ids = registry.patch_ids()
    close = closest(word, [*ids, *registry.names()])
    last = close.rpartition(".")[2]
    alike = [close, *(id for id in ids if id != close and id.rpartition(".")[2] == last)]
    return f"Did you mean {', '.join(map(repr, alike))}? " if close else ""


def _patch(entry: Entry) -> dict[str, Any]:
    patch, contract = entry.patch, entry.patch.contract
    return {
        **{part: getattr(patch, part) for part in _AS_IT_IS},
        "installed": entry.version,
        "tested": entry.tested,
        "tested_versions": list(patch.tested),
        "state": str(entry.state),
        "contract": entry.findings.problem or "holds",
        "target": entry.findings.target,
        "targets": list(patch.targets),
        **{f"contract_{part}": list(getattr(contract, part)) for part in ("params", "exists", "mentions")},
        "contract_since": {version: list(names) for version, names in contract.since.items()},
        "evidence": patch.evidence,
        "evidence_due": explain(patch),
        "one_of": list(patch.one_of),
        "when": patch.when,
        "scope": sorted(patch.scope),
        "needs": list(patch.needs),
        "conflicts": list(patch.conflicts),
    }


def _family(family: Family) -> dict[str, Any]:
    return {
        "family": family.name,
        "summary": family.summary,
        "names": {name: dict(preset) for name, preset in registry.family_names(family).items()},
        "options": {
            name: {
                "default": option.default,
                "choices": list(option.choices),
                **({"range": option.range} if option.range else {}),
                "help": option.help,
            }
            for name, option in family.options.items()
        },
        "about": dict(family.about),
        "patches": [patch.id for patch in family.patches],
        "refuses": list(family.refuses),
        "not_on": {package: list(names) for package, names in family.not_on.items()},
        "commands": dict(family.commands),
    }


def _said(family: Family) -> dict[str, Any]:
    """Return what a terminal shows of a family beside its options: patches are those of ``flashpatch list``."""
    presets = {
        name: ", ".join(f"{key} = {options.written(value)}" for key, value in preset.items())
        for name, preset in registry.family_names(family).items()
    }
    told = {"family": family.name, "summary": family.summary, "names": presets}
    told["patches"] = f"{len(family.patches)}, see flashpatch list {family.name}"
    told["not on"] = {package: ", ".join(names) for package, names in family.not_on.items()}
    return told | {"commands": [f"flashpatch {name}" for name in family.commands]}


def _lines(value: Any) -> list[str]:
    """Return one cell per item, so that long lists stay readable; ``-`` for an empty value."""
    if isinstance(value, dict):
        return [f"{name}: {_text(inner)}" for name, inner in value.items()] or ["-"]
    if isinstance(value, list):
        return [str(item) for item in value] or ["-"]
    return [_text(value)]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(inner)}" for name, inner in value.items()) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " | ".join(map(str, value)) or "-"
    return "-" if value in ("", None) else str(value)
