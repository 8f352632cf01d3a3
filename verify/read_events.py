"""Read back the events of a run's processes, and how many of them were not kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from flashpatch.ledger import events, files, runs, schema
from flashpatch.ledger.nodes import keys, node

_LARGEST = 64 << 20  # bytes of one file
_KINDS = ("events", "samples")


@dataclass
class ProcessEvents:
    """Hold the events of one process, oldest first. ``repeated`` of an event counts equal ones that followed it.

    ``dropped`` and ``dropped_samples`` count old ones that its files had no room for, ``dropped_kinds`` the former by name and
    outcome, see `events.kind_of`; ``lost`` those that it could not write for a time, ``unreadable`` lines that are no event, as
    a killed process leaves."""

    host: str
    pid: int
    start: str
    events: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    dropped_samples: int = 0
    dropped_kinds: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    unreadable: int = 0


def read(folder: Path) -> tuple[list[ProcessEvents], list[str]]:
    """Return what each process of a run recorded, with what was fetched from other nodes, and for each file that was not
    trusted or readable a sentence that names it. Nothing is raised."""
    here: dict[tuple[str, int, str], ProcessEvents] = {}
    problems = []
    for entry in sorted(runs.entries(folder), key=lambda entry: entry.name):
        try:
            _add(here, entry.name, lambda path=entry.path: files.load_bytes(path, _LARGEST)[0])
        except (OSError, ValueError) as error:
            problems.append(schema.text(f"{folder.name}/{entry.name}: {error}"))
    for place in node.places(folder)[0]:  # what is wrong with them, the reader of rows says
        there: dict[tuple[str, int, str], ProcessEvents] = {}
        for name, text in sorted(place.events.items()):
            _add(there, name, lambda text=text: text.encode(errors="replace"))
        here = {**there, **here}
    return [_finished(process) for _, process in sorted(here.items())], problems


def _add(found: dict[tuple[str, int, str], ProcessEvents], name: str, content: Callable[[], bytes]) -> None:
    """Add the lines of a file to those of its process, if it is one of events."""
    match = keys.FILE.fullmatch(name)
    if not match or match["kind"] not in _KINDS:
        return
    of = schema.text(match["host"]), int(match["pid"]), match["start"]
    lines = content().split(b"\n")
    process = found.setdefault(of, ProcessEvents(*of))
    for line in lines:
        event = schema.event(line) if line.strip() else None
        process.unreadable += bool(line.strip()) and event is None
        process.events += [event] if event is not None else []


def _finished(process: ProcessEvents) -> ProcessEvents:
    """Put the events in order, and take out the lines that count what was before: the first one's is missing."""
    marks = [event for event in process.events if event["event"] == events.DROPPED]
    first = min((mark for mark in marks if "events" in mark), key=lambda mark: mark["events"], default={})
    process.dropped, process.dropped_kinds = first.get("events", 0), first.get("by", {})
    process.dropped_samples = min((mark["samples"] for mark in marks if "samples" in mark), default=0)
    process.events = [event for event in process.events if event["event"] != events.DROPPED]
    process.events.sort(key=lambda event: event.get("n", 0))
    process.lost = sum(event.pop("lost", 0) for event in process.events)
    for before, event in pairwise(process.events):
        if "repeats" in event:
            before["repeated"] = event.pop("repeats")
    return process
