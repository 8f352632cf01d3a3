"""Say which policy version each process of a job held when."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from functools import cache
from typing import Any

from flashpatch.ledger.runs import Row

_SEGMENTS = 400
"""The most segments of one lane; shorter ones are joined into one of several versions."""

_LANE_EVENTS = ("update", "adopted")
_APART = ("drafter", "lora")  # roles of updates whose versions are counted apart


def ended(row: Row, events: Iterable[dict[str, Any]]) -> float:
    """Return when a process was last heard of, seconds since 1970; 0 if nothing says."""
    return max([_seconds(row.written), row.first_written, *(event["t"] for event in events)])


@cache
def _seconds(written: str) -> float:
    try:
        return datetime.strptime(written, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return 0.0


def lane(row: Row, process: str, events: Collection[dict[str, Any]], until: float) -> dict[str, Any] | None:
    """Return the lane of a process, until it ended or ``until``; None if it holds no policy.

    `in_order` completes it: it has ``process``; ``label``, which tells it from the others in little room; ``replica``, counted from 1; ``segments``,
    lists of begin, end (seconds since 1970), first and last version; ``marks``, lists of time and text of updates refused or
    abandoned; ``timed``, False if a version is known and its time is not."""
    changes = _changes(events)
    if not changes and "policy_version" not in row.notes:
        return None
    end = until if row.alive else ended(row, events)
    begin = row.first_written or (changes[0][0] if changes else end)
    return {
        "process": process,
        "core": row,
        "segments": _segments(begin, end, changes, int(row.notes.get("policy_version", 0))),
        "marks": _marks(events),
        "timed": bool(changes) or not row.notes.get("policy_version"),
    }


def in_order(found: list[dict[str, Any]], rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the lanes of a job, those of a replica after each other, with ``replica`` and ``label``."""
    known = {(row.host, row.pid) for row in rows if "engine-core" in row.roles}
    for lane in found:
        row = lane["core"]  # that it belongs to: its own process, or its parent
        is_child = (row.host, row.pid) not in known and (row.host, row.ppid) in known
        lane["core"] = row.host, row.ppid if is_child else row.pid
    found.sort(key=lambda lane: (lane["core"], lane["process"]))
    cores = {core: number for number, core in enumerate(dict.fromkeys(lane["core"] for lane in found), 1)}
    for lane in found:
        lane["replica"] = cores[lane.pop("core")]
        lane["label"] = f"replica {lane['replica']}: {lane['process']}"
    return found


def _changes(events: Iterable[dict[str, Any]]) -> list[tuple[float, int]]:
    """Times and versions of what this process took as its policy; a drafter and a LoRA adapter are none."""
    taken: dict[int, float] = {}
    for event in events:
        if event["event"] not in _LANE_EVENTS or event.get("role") in _APART:
            continue
        version = event.get("version")
        if isinstance(version, int) and event.get("outcome", "committed") == "committed":
            taken.setdefault(version, event["t"])
    return sorted((t, version) for version, t in taken.items())


def _segments(
    begin: float, end: float, changes: list[tuple[float, int]], version: int
) -> list[list[float | int]]:
    if not changes:
        return [[begin, end, version, version]]
    starts = [(min(begin, changes[0][0]), max(changes[0][1] - 1, 0)), *changes]
    stops = [*(t for t, _ in changes), max(end, changes[-1][0])]
    segments = [[t, stop, held, held] for (t, held), stop in zip(starts, stops, strict=True)]
    least = (segments[-1][1] - segments[0][0]) / _SEGMENTS
    joined: list[list[float | int]] = []
    for segment in segments:
        if joined and len(segments) > _SEGMENTS and joined[-1][1] - joined[-1][0] < least:
            joined[-1][1], joined[-1][3] = segment[1], segment[3]
        else:
            joined.append(list(segment))
    return joined


def _marks(events: Iterable[dict[str, Any]]) -> list[list[Any]]:
    return [
        [event["t"], f"{event.get('outcome', event['event'])}: {event.get('problem', '')}"[:300]]
        for event in events
        if event["event"] == "refused" or event.get("outcome") in ("abandoned", "replaced")
    ][-100:]
