"""Read back the events of a run's processes, and how many of them were not kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from flashpatch.ledger import events, files, runs, schema
from flashpatch.ledger.nodes import keys, node

_LARGEST = 64 << 20  # bytes of one file


@dataclass
class ProcessEvents:
    """Hold the events of one process, oldest first. ``repeated`` of an event counts equal ones that followed it.

    Attributes:
        dropped: number of old events that its files had no room for.
        dropped_samples: number of old samples, likewise.
        dropped_kinds: name and outcome, see `events.kind_of`, to the number of events that were dropped.
        unreadable: number of lines that are no event; a killed process may leave one.
    """

    host: str
    pid: int
    start: str
    events: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    dropped_samples: int = 0
    dropped_kinds: dict[str, int] = field(default_factory=dict)
    unreadable: int = 0


def read(folder: Path) -> tuple[list[ProcessEvents], list[str]]:
    """Read a run's directory, with what was fetched from other nodes.

    Returns:
        What each process recorded, and for each file that was not trusted or readable a sentence that names it.
        Nothing is raised.
    """
    found, problems = _read_directory(folder)
    known = {(process.host, process.pid, process.start) for process in found}
    for place in _places(folder):
        more, wrong = _read_directory(place.folder)
        found += [process for process in more if (process.host, process.pid, process.start) not in known]
        known |= {(process.host, process.pid, process.start) for process in more}
        problems += wrong
    return found, problems


def _places(folder: Path) -> list[node.Place]:
    """Return what was fetched from other nodes. What is wrong with it, the reader of rows says."""
    try:
        return node.places(folder)[0]
    except (*schema.BROKEN, OverflowError, TypeError, KeyError):
        return []


def _read_directory(folder: Path) -> tuple[list[ProcessEvents], list[str]]:
    found: dict[tuple[str, int, str], ProcessEvents] = {}
    problems = []
    for entry in sorted(runs.entries(folder), key=lambda entry: entry.name):
        match = keys.FILE.fullmatch(entry.name)
        if match is None or match["kind"] not in ("events", "samples"):
            continue
        try:
            content, _ = files.load_bytes(entry.path, _LARGEST)
        except (OSError, ValueError) as error:
            problems.append(schema.text(f"{folder.name}/{entry.name}: {error}"))
            continue
        of = schema.text(match["host"]), int(match["pid"]), match["start"]
        process = found.setdefault(of, ProcessEvents(*of))
        for line in content.split(b"\n"):
            if line.strip():
                _add(process, line)
    for process in found.values():
        process.events.sort(key=lambda event: event.get("n", 0))
        for before, event in pairwise(process.events):
            if "repeats" in event:
                before["repeated"] = event.pop("repeats")
    return list(found.values()), problems


def _add(process: ProcessEvents, line: bytes) -> None:
    event = schema.event(line)
    if event is None:
        process.unreadable += 1
    elif event["event"] != events.DROPPED:
        process.events.append(event)
    else:
        process.dropped_samples = max(process.dropped_samples, event.get("samples", 0))
        if event.get("events", 0) > process.dropped:
            process.dropped, process.dropped_kinds = event["events"], event.get("by", {})
