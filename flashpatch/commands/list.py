"""Run ``flashpatch list``: print every name and whether it fits the installed frameworks, or the patches of one."""

from __future__ import annotations

import argparse
from typing import Any

from flashpatch import registry
from flashpatch.commands import doctor, provenance
from flashpatch.commands.catalogue import Entry, Installation, entries, family_typed
from flashpatch.commands.report import Table, emit
from flashpatch.patch_status import absent_frameworks
from flashpatch.settings import selections

HELP = "every name, or the patches of one, and whether they fit the installed frameworks"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the name whose patches to list."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="list the patches of this name")


def run(args: argparse.Namespace) -> int:
    """Print the list; return 1 when an enabled patch does not fit an installed framework, or a family failed to
    load, which the registry has logged."""
    here = Installation()
    chosen, found = family_typed(args, args.name) if args.name else None, entries(here)
    if chosen is not None:
        found = [entry for entry in found if entry.patch.family == chosen.name]
        title = f"{chosen.name}: {chosen.summary} (names: {', '.join(registry.family_names(chosen))})"
        current = [entry for entry in found if entry.version]
        meant = [one for one in current if here.other_generation(one.patch, chosen.patches) is None]
        rows = [
            (one.patch.id, one.findings.problem or ("tested" if one.tested else "untested"), str(one.state))
            for one in meant
        ]
        table = Table(title, ("patch", "fits", "state"), rows, notes=_left_out(found, meant))
    else:
        columns, note = ("name", "fits", "state", "does"), "flashpatch list NAME: its patches"
        table = Table("Names", columns, _name_rows(found, here), notes=[note])
    broken = registry.problems()
    emit({"patches": [_data(entry) for entry in found], "problems": dict(broken)}, [table], args.json)
    unfit = any(entry.state.word == "skipped" and entry.version for entry in found)
    return int(unfit or bool(broken))


def _name_rows(found: list[Entry], here: Installation) -> list[tuple[str, ...]]:
    with provenance.environment():
        on = selections.from_environment(selections.NOTHING).names
    rows: list[tuple[str, ...]] = []
    for family in registry.families().values():
        mine = [entry.state for entry in found if entry.patch.family == family.name and entry.version]
        states = {state.word: str(state) for state in mine if not state.detail.startswith("family: ")}
        order = "skipped", "waiting", "superseded"
        word = next((states[word] for word in order if word in states), "disabled")
        for outlook in doctor.outlook(family, on, here):
            [name] = outlook.names
            fits = "yes" if outlook.works else f"needs {outlook.needs}" if outlook.needs else "no"
            state = "disabled" if not outlook.asked else word if outlook.verdicts else "not installed"
            rows.append((name, fits, state, family.about.get(name, family.summary)))
    return rows


def _left_out(found: list[Entry], meant: list[Entry]) -> list[str]:
    """Return a line on what is installed, and one per reason why patches are not in the table."""
    versions = dict.fromkeys(entry.version for entry in meant)
    others = sum(bool(entry.version) for entry in found) - len(meant)
    return [
        *([f"installed: {', '.join(versions)}"] if versions else []),
        *([f"for other versions: {others} more"] if others else []),
        *absent_frameworks(entry.patch.id for entry in found if not entry.version),
    ]


def _data(entry: Entry) -> dict[str, Any]:
    return {
        **{part: getattr(entry.patch, part) for part in ("id", "family", "framework", "requires")},
        "installed": entry.version or None,
        "target": entry.findings.target or None,
        "contract": entry.findings.problem or "holds",
        "tested": entry.tested,
        "state": entry.state.word,
        "detail": entry.state.detail,
    }
