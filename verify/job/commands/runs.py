"""Run ``flashpatch runs``: list the runs of a ledger, newest first."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashpatch import __version__, registry
from flashpatch.commands.report import Table, emit
from flashpatch.ledger import files, runs, schema
from flashpatch.verify import ends
from flashpatch.verify.job import collect, source
from flashpatch.verify.read_events import Recorded

HELP = "the runs of a ledger, newest first: command, names, verdict, processes alive"
SUMMARY = ".summary.json"
_SHOWN = 20


def arguments(parser: argparse.ArgumentParser) -> None:
    source.add(parser, "ledger")


def run(args: argparse.Namespace) -> int:
    """Print the newest runs and return 0. Raises PatchError if the ledger has none."""
    ledger = source.ledger(args)
    folders = runs.newest_first(ledger)
    found = list(itertools.islice(filter(None, map(_about, folders)), _SHOWN))
    if not found:
        raise source.no_run(ledger)
    older = max(len(folders) - _SHOWN, 0)
    notes = ["flashpatch report RUN, flashpatch-verify --run RUN: one of them"]
    notes += [f"in {ledger}: {older} older"] if older else []
    columns = ("run", "began", "command", "names", "verdict", "alive")
    rows = []
    for job in found:
        began, name = time.strftime("%b %d %H:%M", time.localtime(job["began"])), Path(job["command"]).name
        alive = f"{job['alive']} of {job['processes']}"
        rows.append((job["run"], began, name, ", ".join(job["names"]), job["verdict"], alive))
    emit(found, [Table("Runs", columns, rows, notes=notes)], args.json)
    return 0


def _about(folder: Path) -> dict[str, Any] | None:
    """Return what is shown of one run, as ``flashpatch report`` and ``flashpatch-verify --live`` judge it; None if it is none. An
    ended one is summed up once, for as long as nothing is written to it."""
    path = folder / SUMMARY
    there = [one for one in runs.entries(folder) if one.name != SUMMARY]
    written = [one.stat(follow_symlinks=False).st_mtime_ns for one in there]
    of = [__version__, len(written), max(written, default=0)]
    with suppress(*schema.BROKEN, KeyError, TypeError):
        if (kept := schema.loads(files.load_bytes(str(path), runs.LARGEST)[0]))["of"] == of:
            return kept["about"]
    if (recorded := Recorded(folder)).run == runs.Run(folder.name):  # nothing is in it
        return None
    job = collect.job(recorded, registry.patches())
    about = {
        "run": folder.name,
        "began": job["began"],
        "command": dict(job["about"]).get("command", ""),
        "names": [name["name"] for name in job["names"]],
        "verdict": job["verdict"],
        "alive": job["alive"],
        "processes": len(job["processes"]),
    }
    if not job["alive"] and job["how"] not in (ends.RUNNING, ends.LOST):
        with suppress(OSError):
            before = folder.stat()
            files.write(path, {"of": of, "about": about})
            os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))  # when the job last wrote to it
    return about
