"""Write a job as trace events, which Perfetto and Chrome's tracing page open.

What was measured as a duration ending at a known time is a slice. Of some phases only the duration is known: they are
slices on a track of their own that says so, and begin with what they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashpatch.verify.job.collect import PHASES
from flashpatch.verify.job.source import Source

_TRACKS = ("events", "commits", "loading (start not recorded)", "steps")
_EVENTS, _COMMITS, _LOADS, _STEPS, _PHASES = 1, 2, 3, 4, 10


def trace(source: Source, names: dict[tuple[str, int, str], str]) -> dict[str, Any]:
    """Return the trace as JSON of the "Trace Event Format"; ``names`` has the name of a process by host, pid and start.

    ``ts`` and ``dur`` are microseconds since the first event, whose time ``otherData`` has. Each process of the job has a
    number of its own as ``pid``, since hosts may share one."""
    rows = source.run.rows
    times = [event["t"] - _seconds(event) for row in rows for event in source.of(row).events]
    times += [row.first_written for row in rows if row.first_written]
    zero = min(times, default=0.0)
    about: dict[str, Any] = {"run": source.run.id, "began_unix_seconds": zero}
    about["os_pids"] = {number: row.pid for number, row in enumerate(rows, 1)}
    titles = dict(enumerate(_TRACKS, 1))
    titles |= {_PHASES + i: f"sync: {name} (start not recorded)" for i, name in enumerate(PHASES)}
    written = []
    for number, row in enumerate(rows, 1):
        found = [one for event in source.of(row).events for one in _event(number, event, zero)]
        tracks = sorted({one["tid"] for one in found} & titles.keys())
        written.append(_meta("process_name", number, 0, names[row.key]))
        written += [_meta("thread_name", number, track, titles[track]) for track in tracks]
        written += found
    return {"traceEvents": written, "displayTimeUnit": "ms", "otherData": about}


def _event(number: int, event: dict[str, Any], zero: float) -> Iterator[dict[str, Any]]:
    kind, end, seconds = event["event"], event["t"] - zero, _seconds(event)
    facts = {key: value for key, value in event.items() if key not in ("t", "event", "n", "values", "sample")}
    if kind == "update":
        name = f"update {event.get('outcome', '')} {event.get('version', '')}".strip()
        yield _slice(number, _EVENTS, name, end - seconds, seconds, facts)
        if event.get("commit_seconds"):
            commit = event["commit_seconds"]
            yield _slice(number, _COMMITS, "commit", end - commit, commit, {})
        if event.get("load_seconds"):
            yield _slice(number, _LOADS, "loading", end - seconds, event["load_seconds"], {})
    elif kind == "sync":
        yield _slice(number, _EVENTS, f"sync {event.get('step', '')}".strip(), end - seconds, seconds, facts)
        for track, phase in enumerate(PHASES, _PHASES):
            if event.get(f"timing_s/sync/{phase}"):
                yield _slice(number, track, phase, end - seconds, event[f"timing_s/sync/{phase}"], {})
    elif kind == "metrics":
        if seconds:
            name = f"step {event.get('step', '')}".strip()
            times = {key: value for key, value in event["values"].items() if key.startswith("timing_s/")}
            yield _slice(number, _STEPS, name, end - seconds, seconds, times)
    elif kind == "speculation":
        values = {"tokens per speculative step": event.get("acceptance_length") or 0}
        yield {"ph": "C", "pid": number, "tid": 0, "name": "acceptance", "ts": _us(end), "args": values}
    elif seconds:
        yield _slice(number, _EVENTS, kind, end - seconds, seconds, facts)
    else:
        yield dict(ph="i", s="p", pid=number, tid=_EVENTS, name=kind, ts=_us(end), args=facts)


def _seconds(event: dict[str, Any]) -> float:
    """Duration of what ended at the event's time; 0 if none was recorded."""
    if event["event"] == "sync":
        return float(event.get("timing_s/sync/total") or 0)
    if event["event"] == "metrics":
        return float(event.get("values", {}).get("timing_s/step") or 0)
    return float(event.get("seconds") or 0)


def _slice(
    number: int, track: int, name: str, begin: float, seconds: float, facts: dict[str, Any]
) -> dict[str, Any]:
    return dict(ph="X", pid=number, tid=track, name=name, ts=_us(begin), dur=_us(seconds), args=facts)


def _meta(what: str, number: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": number, "tid": track, "name": what, "ts": 0, "args": {"name": name}}


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
