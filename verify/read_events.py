"""Read back the events of a run's processes, and how many of them were not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from flashpatch.ledger import events, files, runs, schema
from flashpatch.ledger.nodes import keys, node

_LARGEST = 64 << 20  # bytes of one file
_KINDS = ("events", "samples")
_Key = tuple[str, int, str]
_Files = list[tuple[str, Callable[[], Sequence[Any]]]]


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


class Recorded:
    """Hold the rows of a run, and read what a process of it recorded each time it is asked for, as all of it may be much.

    ``files`` has by host, pid and start those of each process, what was fetched from other nodes too. ``problems`` gets for each file
    that was not trusted or readable a sentence that names it; nothing is raised."""

    def __init__(self, folder: Path) -> None:
        self.run, self.problems = runs.read_run(folder) or runs.Run(folder.name), dict[str, None]()
        self.files = dict[_Key, _Files]()
        for place in node.places(folder)[0]:  # what is wrong with them, the reader of rows says
            there = sorted(place.events.items())
            self.files |= _by_process(
                (name, lambda text=text: [text.encode(errors="replace")]) for name, text in there
            )
        here = sorted(runs.entries(folder), key=lambda entry: entry.name)
        self.files |= _by_process((one.name, partial(files.load_bytes, one.path, _LARGEST)) for one in here)

    def of(self, key: _Key) -> ProcessEvents:
        process = ProcessEvents(*key)
        for name, content in self.files.get(key, ()):
            try:
                lines = [line for line in content()[0].split(b"\n") if line.strip()]
            except (OSError, ValueError) as error:
                self.problems[schema.text(f"{self.run.id}/{name}: {error}")] = None
                continue
            found = [event for event in map(schema.event, lines) if event is not None]
            process.unreadable += len(lines) - len(found)
            process.events += found
        return _finished(process)


def _by_process(named: Iterable[tuple[str, Callable[[], Sequence[Any]]]]) -> dict[_Key, _Files]:
    """Return by process those of some files that have events: name, and what reads it, the content first."""
    found: dict[_Key, _Files] = {}
    for name, content in named:
        match = keys.FILE.fullmatch(name)
        if match and match["kind"] in _KINDS:
            of = schema.text(match["host"]), int(match["pid"]), match["start"]
            found.setdefault(of, []).append((name, content))
    return found


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
