"""Run ``flashpatch status``: print what the processes of the latest run reported."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.commands import original_env
from flashpatch.commands.report import Table, emit
from flashpatch.ledger import files
from flashpatch.ledger.nodes import gather
from flashpatch.ledger.runs import Expected, Row, Run
from flashpatch.patch_status import is_absent

HELP = "what the processes of the latest run reported"
_COLUMNS = ("pid", "host", "roles", "alive", "patch", "state", "calls", "tested")
_BAD = frozenset({"skipped", "displaced", "failed"})
_ALIVE = {True: "yes", False: "no", None: "?"}
_TESTED = {True: "tested", False: "untested", None: "-"}
_OUR_COMMANDS = frozenset({"flashpatch", "flashpatch-verify"})


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ledger", metavar="DIR", type=Path, help="read this ledger instead of the user's")
    parser.add_argument("--ray", nargs="?", const="", metavar="ADDRESS", help=gather.HELP)


def run(args: argparse.Namespace) -> int:
    """Print the latest run; return 1 when there is none, an expected process is missing, or a patch does not act
    though its framework is installed."""
    with original_env.environment():
        directory = args.ledger or files.directory()
    runs = ledger.read(directory)
    if args.ray is not None:
        try:
            gathered = gather.Gathered(directory, args.ray).folder.name
        except LookupError as error:
            print(error.args[0], file=sys.stderr)
            return 1
        runs = [found for found in ledger.read(directory) if found.id == gathered]
    latest = next((found for found in map(_of_jobs, reversed(runs)) if found), None)
    if latest is None:
        print(f"no run in {directory}: no process with FLASHPATCH set has reported there", file=sys.stderr)
        return 1
    rows = [(row.node.label if row.node else "-", *line) for row in latest.rows for line in _lines(row)] + [
        ("-", *_missing(expected)) for expected in latest.missing
    ]
    first = 0 if any(row.node for row in latest.rows) else 1  # the column of nodes is for jobs that have them
    table = Table(f"Run {latest.id}", ("node", *_COLUMNS)[first:], [row[first:] for row in rows])
    emit(_data(latest), [table], args.json)
    complaints = [f"pid {row.pid}: {row.error}" for row in latest.rows if row.error] + latest.problems
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    bad = any(_is_bad(patch) for row in latest.rows for patch in row.patches.values())
    return int(bad or bool(complaints) or bool(latest.missing))


def _of_jobs(found: Run) -> Run | None:
    """Return the run without rows of FlashPatch's own commands, which report too when FLASHPATCH is set."""
    found.rows = [row for row in found.rows if Path(row.argv0).name not in _OUR_COMMANDS]
    return found if found.rows or found.expected or found.problems else None


def _lines(row: Row) -> list[tuple[str, ...]]:
    """Return one line per patch that is on, or one for a process without any."""
    who = (str(row.pid), row.host, _who(row.roles, row.rank), _ALIVE[row.alive])
    on = {name: patch for name, patch in row.patches.items() if patch["state"] != "disabled"}
    absent = Counter(
        name.split(".")[1] for name, patch in on.items() if is_absent(patch["state"], patch["detail"])
    )
    lines: list[tuple[str, ...]] = [
        (*who, name, *_cells(patch)) for name, patch in on.items() if name.split(".")[1] not in absent
    ]
    lines += [(*who, f"{n} for {name}", "skipped(not installed)", "-", "-") for name, n in absent.items()]
    return lines or [(*who, "-", "-", "-", "-")]


def _is_bad(patch: Any) -> bool:
    return patch["state"] in _BAD and not is_absent(patch["state"], patch["detail"])


def _cells(patch: Any) -> tuple[str, str, str]:
    state = f"{patch['state']}({patch['detail']})" if patch["detail"] else patch["state"]
    return state, str(patch["calls"]), _TESTED[patch["tested"]]


def _who(roles: tuple[str, ...], rank: Any) -> str:
    ranks = (f"{name}={value}" for name, value in rank.items())
    return " ".join([*roles, *ranks]) or "-"


def _missing(expected: Expected) -> tuple[str, ...]:
    families = ", ".join(expected.families) or "-"
    state = f"missing(expected by {expected.by})"
    return str(expected.pid), expected.host, _who(expected.roles, {}), "?", families, state, "-", "-"


def _data(found: Run) -> dict[str, Any]:
    return {
        "run": found.id,
        "rows": [{**asdict(row), "alive": row.alive} for row in found.rows],
        "missing": [asdict(expected) for expected in found.missing],
        "problems": found.problems,
    }
