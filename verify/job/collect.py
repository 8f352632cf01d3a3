"""Gather one job's processes, updates, syncs, refusals and measurements into one dictionary, fit for JSON.

The page, the live view and the metrics show this and nothing else."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashpatch import __version__, registry
from flashpatch.evidence import explain
from flashpatch.ledger import files
from flashpatch.ledger.runs import Row
from flashpatch.patch_status import is_absent
from flashpatch.record import Patch
from flashpatch.verify import ends, live
from flashpatch.verify.job import lanes, page, series
from flashpatch.verify.read_events import Recorded

PHASES = ("gather", "transfer", "load", "process")
"""Parts of a sync under verl, in the order in which they begin; see `flashpatch.patches.fp8.verl.transfer.receipts`."""

_TEXT = 600  # letters of a problem
_UPDATES = 10_000
"""The most updates that are shown, the newest."""
_LOST = ("dropped", "dropped_samples", "lost", "unreadable")
_Key = tuple[str, int, str]
_Event = dict[str, Any]


def job(source: Recorded, patches: Mapping[str, Patch], now: float | None = None) -> dict[str, Any]:
    """Return what is known of a job, for the page: see the keys below. Times are seconds since 1970.

    ``about`` says what job it was (label, text), ``verdict`` whether what is due was observed, ``how`` the job ended, ``stated`` what the names
    did, ``names`` one entry per name that the user typed, ``recorded`` how many events were read, and how many were not kept, and ``not_recorded`` sentences.
    """
    now = time.time() if now is None else now
    report = live.judge(source.run, patches)
    rows, named = {row.key: row for row in source.run.rows}, names(source)
    shown, told = _gathered(source, rows, named, now)
    found = {
        "run": source.run.id,
        "version": __version__,
        "generated": now,
        "about": about(source.run.rows),
        "verdict": report.verdict,
        "how": report.ended,
        "running": report.ended == ends.RUNNING,
        "stated": [vars(one) | {"name": report.typed[one.family]} for one in report.stated],
        "names": [{**vars(one), "versions": [*one.versions], "cells": one.cells()} for one in report.names],
        "problems": [*report.lines, *(text for _, text in report.remarks), *source.problems],
        "processes": [_process(one, rows.get(one.key), named, told) for one in report.processes],
        "patches": of_patches(source.run.rows, patches),
        **shown,
    }
    times = [time for one in told.values() for time in one["times"] if time]
    found["alive"] = sum(process["alive"] == "yes" for process in found["processes"])
    found["began"] = min(times, default=now)
    found["ended"] = now if found["running"] else max(times, default=now)
    found["incidents"] += _untimed(rows.values(), named, report)
    found["not_recorded"] = _not_recorded(found)
    return found


def _gathered(
    source: Recorded, rows: Mapping[_Key, Row], named: Mapping[_Key, str], now: float
) -> tuple[dict[str, Any], dict[_Key, dict[str, Any]]]:
    """Return what the page shows of events, and by process what its entry says of them. The events of one process at a time are in
    memory: a job may have millions."""
    updates, syncs, incidents, held = list[_Event](), list[_Event](), list[_Event](), list[_Event]()
    charts, told, recorded = series.Collected(), dict[_Key, dict[str, Any]](), Counter[str]()
    for key in dict.fromkeys([*rows, *source.files]):
        process = source.of(key)
        recorded.update({name: getattr(process, name) for name in _LOST})
        recorded.update(events=len(process.events), processes=key in source.files)
        if key not in rows:
            continue
        events, name = process.events, named[key]
        updates += [_update(event) | {"process": name} for event in events if event["event"] == "update"]
        syncs += [_sync(event) for event in events if event["event"] == "sync"]
        incidents += _happened(name, events)
        held += [lane for lane in [lanes.lane(rows[key], name, events, now)] if lane]
        series.add(charts, name, events)
        at = [event["t"] for event in events] or [0.0]
        memory = [event["rss_bytes"] for event in events if event.get("rss_bytes")]
        last = lanes.ended(rows[key], events)
        told[key] = {"rss_bytes": memory[-1] if memory else None, "events": len(events), "ended": last}
        told[key]["times"] = rows[key].first_written, min(at), max(at), last
        if len(updates) > 2 * _UPDATES:
            recorded.update(_drop_older(updates))
    recorded.update(_drop_older(updates))
    for found in (syncs, incidents):
        found.sort(key=lambda one: one["t"])
    shown = {"updates": updates, "syncs": syncs, "incidents": incidents, "recorded": dict(recorded)}
    return shown | {"lanes": lanes.in_order(held, rows.values()), "charts": series.charts(charts)}, told


def _drop_older(updates: list[_Event]) -> dict[str, int]:
    """Put updates in order, and leave as many of the newest as a page has; return how many were dropped, if some were."""
    updates.sort(key=lambda one: one["t"])
    dropped = max(len(updates) - _UPDATES, 0)
    del updates[:dropped]
    return {"older": dropped} if dropped else {}


def read(folder: Path) -> dict[str, Any]:
    """Return `job` of a run's directory, now, by the records of all patches."""
    return job(Recorded(folder), registry.patches())


def names(source: Recorded) -> dict[_Key, str]:
    """Return host, pid and start of each process of a job to what it is called, with the start if only that tells two apart."""
    found = {row.key: live.called_by(row) for row in source.run.rows}
    many = Counter(found.values())
    return {key: name if many[name] == 1 else f"{name} started {key[2]}" for key, name in found.items()}


def about(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Return what to show above a job, label and text; a line of which nothing is known is left out."""
    rows = sorted(rows, key=lambda row: (row.first_written or float("inf"), row.pid))
    versions: dict[str, dict[str, None]] = {}
    for row in rows:
        for package, version in row.versions.items():
            versions.setdefault(package, {})[version] = None
    names = (files.name_and_options(family, on) for row in rows for family, on in row.on.items())
    lines = {
        "command": next((row.argv0 for row in rows if row.argv0), ""),
        "names": ", ".join(dict.fromkeys(names)),
        "versions": ", ".join(f"{one} {' and '.join(found)}" for one, found in sorted(versions.items())),
        "machines": ", ".join(dict.fromkeys(row.host for row in rows)),
    }
    return [(what, text) for what, text in lines.items() if text]


def _process(
    one: live.Process, row: Row | None, named: Mapping[_Key, str], told: Mapping[_Key, _Event]
) -> _Event:
    of = told[row.key] if row is not None else {"rss_bytes": None, "events": 0, "ended": 0.0}
    return {
        "name": named[row.key] if row is not None else live.called_by(one),
        **{name: getattr(one, name) for name in ("host", "pid", "start", "node", "calls", "verdict")},
        **{name: list(getattr(one, name)) for name in ("roles", "names", "problems")},
        "rank": dict(one.rank),
        "alive": one.lives,
        "how": one.how,
        "states": dict(one.states),
        "began": row.first_written if row is not None else 0.0,
        "version": row.notes.get("policy_version") if row is not None else None,
        **{name: of[name] for name in ("ended", "rss_bytes", "events")},
    }


def of_patches(rows: Sequence[Row], known: Mapping[str, Patch]) -> list[dict[str, Any]]:
    """Return one entry per patch that was on somewhere, with its calls over all processes."""
    found: dict[str, dict[str, Any]] = {}
    parts = {id(part): part for row in rows for part in row.parts}  # many rows share one
    many = Counter(id(part) for row in rows for part in row.parts)
    for number, part in parts.items():
        for name, patch in part.items():
            if name not in found:
                due, why = "unknown", "not a patch of this FlashPatch"
                if record := known.get(name):
                    due, why = explain(record), record.why
                counts = dict(calls=0, processes=0, states=Counter())
                found[name] = dict(id=name, due=due, **counts, tested=None, why=why)
            entry = found[name]
            absent = is_absent(patch["state"], patch.get("detail") or "")
            entry["states"]["not installed" if absent else patch["state"]] += many[number]
            entry["calls"] += patch["calls"] * many[number]
            entry["processes"] += many[number] * bool(patch["calls"])
            entry["tested"] = patch.get("tested") if patch.get("tested") is not None else entry["tested"]
    order = sorted(found.values(), key=lambda entry: (not entry["calls"], entry["id"]))
    return [{**entry, "states": dict(entry["states"])} for entry in order]


def _update(event: _Event) -> _Event:
    return {
        "t": event["t"],
        "role": event.get("role", "target"),
        "outcome": event.get("outcome", "committed"),
        "load": event.get("load_seconds"),
        "commit": event.get("commit_seconds"),
        **{name: event.get(name) for name in ("version", "seconds", "buckets")},
    }


def _sync(event: _Event) -> _Event:
    return {
        "t": event["t"],
        "step": event.get("step"),
        **{name: event.get(f"timing_s/sync/{name}") for name in (*PHASES, "total")},
        "bytes": event.get("sync/bytes"),
        "share": event.get("sync/wire_share"),
        "version": event.get("sync/policy_version"),
    }


def _happened(process: str, events: list[_Event]) -> Iterator[_Event]:
    """Yield refusals, failed updates and errors."""
    for event in events:
        kind = event["event"]
        if kind == "update" and event.get("outcome") in ("abandoned", "replaced"):
            kind = f"update {event['outcome']}"
        elif kind == "audit" and event.get("problem"):
            kind = "audit"
        elif kind not in ("refused", "error"):
            continue
        text = ": ".join(str(event[key]) for key in ("what", "problem") if event.get(key))
        repeats = f" (and {event['repeated']} times more)" if event.get("repeated") else ""
        yield {"t": event["t"], "process": process, "kind": kind, "text": text[:_TEXT] + repeats}


def _untimed(rows: Iterable[Row], named: Mapping[_Key, str], report: live.LiveReport) -> Iterator[_Event]:
    """Yield errors, verdicts and what is off: their time was not recorded, so ``t`` is None."""
    errors = [(named[row.key], "error", row.error) for row in rows if row.error]
    told = {text for *_, text in errors}
    judged = [("verdict", one) for one in report.lines] + [*report.remarks]
    errors += [("", kind, one) for kind, one in judged if not any(error in one for error in told)]
    yield from (dict(t=None, process=process, kind=kind, text=text[:_TEXT]) for process, kind, text in errors)


def _not_recorded(found: dict[str, Any]) -> list[str]:
    """Return one sentence per thing that is not known of a job, of what was gathered."""
    there = {chart["id"] for chart in found["charts"]} | {one for one in ("updates", "syncs") if found[one]}
    said = [text for shown_by, text in page.said()["missing"] if there.isdisjoint(shown_by)]
    counts = {
        "older": 0,
        **found["recorded"],
        "untimed": sum(not lane["timed"] for lane in found["lanes"]),
        "silent": sum(not process["events"] for process in found["processes"]),
        "all": len(found["processes"]),
        "left_out": sum(chart["lines_left_out"] for chart in found["charts"]),
    }
    return said + [text.format(**counts) for name, text in page.said()["counted"].items() if counts[name]]
