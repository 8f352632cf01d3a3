"""Run ``flashpatch runs``: list the runs of a ledger, newest first."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

from flashpatch.commands.report import Table, emit
from flashpatch.ledger import runs
from flashpatch.verify.job import collect, source

HELP = "the runs of a ledger, newest first: command, names, verdict, processes alive"
_SHOWN = 20


def arguments(parser: argparse.ArgumentParser) -> None:
    source.ledger_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print the newest runs and return 0. Raises PatchError if the ledger has none."""
    ledger = source.ledger(args)
    folders = runs.newest_first(ledger)
    jobs = (folder for folder in folders if runs.read_run(folder) is not None)
    found = [_about(folder) for folder in itertools.islice(jobs, _SHOWN)]
    if not found:
        raise source.no_run(source.NONE.format(ledger))
    found.sort(key=lambda one: one["began"], reverse=True)
    older = max(len(folders) - _SHOWN, 0)
    notes = ["flashpatch report RUN, flashpatch-verify --run RUN: one of them"]
    notes += [f"in {ledger}: {older} older"] if older else []
    columns = ("run", "began", "command", "names", "verdict", "alive")
    emit(found, [Table("Runs", columns, [_cells(one) for one in found], notes=notes)], args.json)
    return 0


def _about(folder: Path) -> dict[str, Any]:
    """Return what is shown of one run: as ``flashpatch report`` and ``flashpatch-verify --live`` judge it."""
    job = collect.read(folder)
    return {
        "run": folder.name,
        "began": job["began"],
        "command": dict(job["about"]).get("command", ""),
        "names": [name["name"] for name in job["names"]],
        "verdict": job["verdict"] if job["names"] or job["problems"] else "nothing on",
        "alive": job["alive"],
        "processes": len(job["processes"]),
    }


def _cells(job: dict[str, Any]) -> tuple[str, ...]:
    began = time.strftime("%b %d %H:%M", time.localtime(job["began"]))
    alive = f"{job['alive']} of {job['processes']}"
    return job["run"], began, Path(job["command"]).name, ", ".join(job["names"]), job["verdict"], alive
