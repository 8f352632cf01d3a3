"""Gather one job's processes, updates, syncs, refusals and measurements into one dictionary, fit for JSON.

The page, the live view and the metrics show this and nothing else."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flashpatch import __version__, registry
from flashpatch.ledger import files
from flashpatch.ledger.runs import Row
from flashpatch.patch_status import is_absent
from flashpatch.record import Patch
from flashpatch.verify import ends, live
from flashpatch.verify.job import lanes, page, series
from flashpatch.verify.job.source import Source, load

PHASES = ("gather", "transfer", "load", "process")
"""Parts of a sync under verl, in the order in which they begin; see `flashpatch.patches.fp8.verl.transfer.receipts`."""

_TEXT = 600  # letters of a problem
_LOST = ("dropped", "dropped_samples", "lost", "unreadable")  # counts of events that were not kept
_Key = tuple[str, int, str]
_Event = dict[str, Any]
_Events = list[tuple[str, list[_Event]]]  # by process


def job(source: Source, patches: Mapping[str, Patch], now: float | None = None) -> dict[str, Any]:
    """Return what is known of a job, for the page: see the keys below. Times are seconds since 1970.

    ``about`` says what job it was (label, text), ``verdict`` whether what is due was observed, ``how`` the job ended, ``stated`` what the names
    did, ``names`` one entry per name that the user typed, ``recorded`` how many events were read, and how many were not kept, and ``not_recorded`` sentences.
    """
    now = time.time() if now is None else now
    report = live.judge(source.run, patches)
    named = names(source)
    events = [(named[row.key], source.of(row).events) for row in source.run.rows]
    rows = {row.key: row for row in source.run.rows}
    found = {
        "run": source.run.id,
        "version": __version__,
        "generated": now,
        "about": _about(source.run.rows),
        "verdict": report.verdict,
        "how": report.ended,
        "running": report.ended == ends.RUNNING,
        "stated": [vars(one) | {"name": report.typed[one.family]} for one in report.stated],
        "names": [
            {**vars(name), "versions": list(name.versions), "cells": name.cells()} for name in report.names
        ],
        "problems": [*report.lines, *(text for _, text in report.remarks), *source.problems],
        "processes": [
            _process(one, rows.get((one.host, one.pid, one.start)), named, source) for one in report.processes
        ],
        "patches": _patches(source.run.rows, patches),
        "lanes": lanes.lanes(source, named, now),
        "updates": _of_kind(events, "update", _update),
        "syncs": _of_kind(events, "sync", _sync),
        "charts": series.charts(events),
        "recorded": {
            "events": sum(len(process.events) for process in source.events.values()),
            "processes": len(source.events),
            **{name: sum(getattr(process, name) for process in source.events.values()) for name in _LOST},
        },
    }
    times = [event["t"] for _, mine in events for event in mine]
    times += [row.first_written for row in source.run.rows if row.first_written]
    last = [lanes.ended(row, source.of(row).events) for row in source.run.rows]
    found["alive"] = sum(process["alive"] == "yes" for process in found["processes"])
    found["began"] = min((t for t in [*times, *last] if t), default=now)
    found["ended"] = now if found["running"] else max([*times, *last], default=now)
    found["incidents"] = _incidents(source, named, events, report)
    found["not_recorded"] = _not_recorded(found)
    return found


def read(folder: Path) -> dict[str, Any]:
    """Return `job` of a run's directory, now, by the records of all patches."""
    return job(load(folder), registry.patches())


def names(source: Source) -> dict[_Key, str]:
    """Return host, pid and start of each process of a job to its name: roles, ranks, host, pid, the node of Ray, and the start
    if only that tells two apart."""
    found = {}
    for row in source.run.rows:
        what = " ".join(filter(None, ("+".join(row.roles), row.title))) or "process"
        ranks = " ".join(f"{name}={value}" for name, value in row.rank.items())
        node = f"on {row.node.label}" if row.node is not None else ""
        found[row.key] = " ".join(filter(None, (what, ranks, f"{row.host}:{row.pid}", node)))
    many = Counter(found.values())
    return {key: name if many[name] == 1 else f"{name} started {key[2]}" for key, name in found.items()}


def _about(rows: Iterable[Row]) -> list[tuple[str, str]]:
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
        "versions": ", ".join(
            f"{package} {' and '.join(found)}" for package, found in sorted(versions.items())
        ),
        "machines": ", ".join(dict.fromkeys(row.host for row in rows)),
    }
    return [(what, text) for what, text in lines.items() if text]


def _process(one: live.Process, row: Row | None, named: Mapping[_Key, str], source: Source) -> dict[str, Any]:
    events = source.of(row).events if row is not None else []
    memory = [event["rss_bytes"] for event in events if event.get("rss_bytes")]
    return {
        "name": named[row.key] if row is not None else one.name,
        **{name: getattr(one, name) for name in ("host", "pid", "start", "node", "calls", "verdict")},
        **{name: list(getattr(one, name)) for name in ("roles", "names", "problems")},
        "rank": dict(one.rank),
        "alive": one.lives,
        "how": one.ended or one.lives,
        "states": dict(one.states),
        "began": row.first_written if row is not None else 0.0,
        "ended": lanes.ended(row, events) if row is not None else 0.0,
        "version": row.notes.get("policy_version") if row is not None else None,
        "rss_bytes": memory[-1] if memory else None,
        "events": len(events),
    }


def _patches(rows: list[Row], patches: Mapping[str, Patch]) -> list[dict[str, Any]]:
    """Return one entry per patch that was on somewhere, with its calls over all processes."""
    found: dict[str, dict[str, Any]] = {}
    parts = {id(part): part for row in rows for part in row.parts}  # many rows share one
    many = Counter(id(part) for row in rows for part in row.parts)
    for number, part in parts.items():
        for name, patch in part.items():
            if name not in found:
                known = patches.get(name)
                due, why = (
                    (known.evidence, known.why) if known else ("unknown", "not a patch of this FlashPatch")
                )
                found[name] = dict(
                    id=name, due=due, calls=0, processes=0, states=Counter(), tested=None, why=why
                )
            entry = found[name]
            absent = is_absent(patch["state"], patch.get("detail") or "")
            entry["states"]["not installed" if absent else patch["state"]] += many[number]
            entry["calls"] += patch["calls"] * many[number]
            entry["processes"] += many[number] * bool(patch["calls"])
            entry["tested"] = patch.get("tested") if patch.get("tested") is not None else entry["tested"]
    order = sorted(found.values(), key=lambda entry: (not entry["calls"], entry["id"]))
    return [{**entry, "states": dict(entry["states"])} for entry in order]


def _of_kind(events: _Events, kind: str, shown: Callable[[_Event], _Event]) -> list[_Event]:
    """Return what is shown of each event of a kind, with its time and its process, the oldest first."""
    found = [
        {"t": event["t"], "process": process, **shown(event)}
        for process, mine in events
        for event in mine
        if event["event"] == kind
    ]
    return sorted(found, key=lambda one: one["t"])


def _update(event: _Event) -> _Event:
    return {
        "role": event.get("role", "target"),
        "outcome": event.get("outcome", "committed"),
        "load": event.get("load_seconds"),
        "commit": event.get("commit_seconds"),
        **{name: event.get(name) for name in ("version", "seconds", "buckets")},
    }


def _sync(event: _Event) -> _Event:
    return {
        "step": event.get("step"),
        **{name: event.get(f"timing_s/sync/{name}") for name in (*PHASES, "total")},
        "bytes": event.get("sync/bytes"),
        "share": event.get("sync/wire_share"),
        "version": event.get("sync/policy_version"),
    }


def _incidents(
    source: Source, named: Mapping[_Key, str], events: _Events, report: live.LiveReport
) -> list[_Event]:
    """Return refusals, failed updates, errors, verdicts and what is off; those whose time was not recorded have ``t`` None."""
    found = []
    for process, mine in events:
        for event in mine:
            kind = event["event"]
            if kind == "update" and event.get("outcome") in ("abandoned", "replaced"):
                kind = f"update {event['outcome']}"
            elif kind == "audit" and event.get("problem"):
                kind = "audit"
            elif kind == "drafter" and event.get("what") in ("worse", "rollback"):
                numbers = (event.get(when) for when in ("before", "after"))
                lengths = [f"{number:.2f}" for number in numbers if isinstance(number, float)]
                accepted = f", tokens per speculative step {' then '.join(lengths)}" if lengths else ""
                event = {**event, "problem": f"drafter version {event.get('version')}{accepted}"}
            elif kind not in ("refused", "error"):
                continue
            text = ": ".join(str(event[key]) for key in ("what", "problem") if event.get(key))
            repeats = f" (and {event['repeated']} times more)" if event.get("repeated") else ""
            found.append({"t": event["t"], "process": process, "kind": kind, "text": text[:_TEXT] + repeats})
    found.sort(key=lambda incident: incident["t"])
    errors = [(named[row.key], "error", row.error) for row in source.run.rows if row.error]
    told = {text for *_, text in errors}
    judged = [("verdict", one) for one in report.lines] + [*report.remarks]
    errors += [("", kind, one) for kind, one in judged if not any(error in one for error in told)]
    untimed = (dict(t=None, process=process, kind=kind, text=text[:_TEXT]) for process, kind, text in errors)
    return [*found, *untimed]


def _not_recorded(found: dict[str, Any]) -> list[str]:
    """Return one sentence per thing that is not known of a job, of what was gathered."""
    there = {chart["id"] for chart in found["charts"]} | {
        name for name in ("updates", "syncs") if found[name]
    }
    said = [text for shown_by, text in page.said()["missing"] if there.isdisjoint(shown_by)]
    counts = {
        **found["recorded"],
        "untimed": sum(not lane["timed"] for lane in found["lanes"]),
        "silent": sum(not process["events"] for process in found["processes"]),
        "all": len(found["processes"]),
        "left_out": sum(chart["lines_left_out"] for chart in found["charts"]),
    }
    return said + [text.format(**counts) for name, text in page.said()["counted"].items() if counts[name]]
