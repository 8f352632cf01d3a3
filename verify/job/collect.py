"""Gather one job's processes, updates, syncs, refusals and measurements into one dictionary, fit for JSON.

The page, the live view, the trace and the metrics show this and nothing else.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from flashpatch import __version__
from flashpatch.ledger.runs import Row
from flashpatch.patch_status import is_absent
from flashpatch.record import Patch
from flashpatch.verify import live, typed_names
from flashpatch.verify.job import gaps, lanes, series
from flashpatch.verify.job.about import about
from flashpatch.verify.job.source import Source

PHASES = ("gather", "transfer", "load", "process")
"""Parts of a sync under verl, in the order in which they begin; see `flashpatch.patches.fp8.verl.transfer.receipts`."""

_TEXT = 600  # letters of a problem
_Key = tuple[str, int, str]


def job(source: Source, patches: Mapping[str, Patch], now: float | None = None) -> dict[str, Any]:
    """Return what is known of a job.

    Args:
        source: its rows and events.
        patches: known patches by id, for evidence that is due and what a patch is for.
        now: seconds since 1970; the time now if it is left out.

    Returns:
        ``run``, ``version``, ``generated``, ``about`` (what job it was: label, text), ``began``, ``ended``, ``alive`` (how many processes run), ``verdict`` (whether
        what is due was observed), ``names`` (one entry per name that the user typed), ``processes``, ``patches``,
        ``lanes``, ``updates``, ``syncs``, ``incidents``, ``charts``, ``recorded`` (how many events were read, and how
        many were not kept) and ``not_recorded`` (sentences). Times are seconds since 1970.
    """
    now = time.time() if now is None else now
    report = live.judge(source.run, patches)
    typed = typed_names.typed_names(source.run.rows, report)
    idle = typed_names.idle(typed)
    named = names(source)
    events = [(named[row.key], source.of(row).events) for row in source.run.rows]
    rows = {row.key: row for row in source.run.rows}
    found = {
        "run": source.run.id,
        "version": __version__,
        "generated": now,
        "about": about(source.run.rows),
        "verdict": "not proven" if report.problems or idle else "proven",
        "names": [{**vars(name), "acted": name.where, "versions": list(name.versions)} for name in typed],
        "problems": [*report.problems, *idle, *source.problems],
        "processes": [
            _process(one, rows.get((one.host, one.pid, one.start)), named, source) for one in report.processes
        ],
        "patches": _patches(source.run.rows, patches),
        "lanes": lanes.lanes(source, named, now),
        "updates": _of_kind(events, "update", _update),
        "syncs": _of_kind(events, "sync", _sync),
        "charts": series.charts(events),
        "recorded": _recorded(source),
    }
    times = [event["t"] for _, mine in events for event in mine]
    times += [row.first_written for row in source.run.rows if row.first_written]
    ends = [lanes.ended(row, source.of(row).events) for row in source.run.rows]
    found["alive"] = sum(process["alive"] == "yes" for process in found["processes"])
    found["began"] = min((t for t in [*times, *ends] if t), default=now)
    found["ended"] = now if found["alive"] else max([*times, *ends], default=now)
    found["incidents"] = _incidents(source, named, events, report.problems)
    found["not_recorded"] = gaps.sentences(found)
    return found


def names(source: Source) -> dict[_Key, str]:
    """Return host, pid and start of each process of a job to its name: roles, ranks, host, pid, the node of Ray, and the start
    if only that tells two apart."""
    found = {}
    for row in source.run.rows:
        what = " ".join(filter(None, ("+".join(row.roles), row.title))) or "process"
        ranks = " ".join(f"{name}={value}" for name, value in row.rank.items())
        node = f"on {row.node.title}" if row.node is not None else ""
        found[row.key] = " ".join(filter(None, (what, ranks, f"{row.host}:{row.pid}", node)))
    many = Counter(found.values())
    return {key: name if many[name] == 1 else f"{name} started {key[2]}" for key, name in found.items()}


def finite(value: Any) -> Any:
    """Return a copy with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _process(one: live.Process, row: Row | None, named: Mapping[_Key, str], source: Source) -> dict[str, Any]:
    states = Counter(str(patch["state"]) for patch in one.patches.values())
    events = source.of(row) if row is not None else None
    memory = [event["rss_bytes"] for event in events.events if event.get("rss_bytes")] if events else []
    return {
        "name": named[row.key] if row is not None else one.name,
        "host": one.host,
        "pid": one.pid,
        "start": one.start,
        "node": one.node,
        "roles": list(one.roles),
        "rank": dict(one.rank),
        "alive": one.lives,
        "names": list(one.names),
        "states": dict(states),
        "calls": one.calls,
        "verdict": one.verdict,
        "problems": list(one.problems),
        "began": row.first_written if row is not None else 0.0,
        "ended": lanes.ended(row, events.events) if row is not None and events else 0.0,
        "version": row.notes.get("policy_version") if row is not None else None,
        "rss_bytes": memory[-1] if memory else None,
        "events": len(events.events) if events else 0,
    }


def _patches(rows: list[Row], patches: Mapping[str, Patch]) -> list[dict[str, Any]]:
    """Return one entry per patch that was on somewhere, with its calls over all processes."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for id, patch in row.patches.items():
            if patch["state"] == "disabled":
                continue
            known = patches.get(id)
            entry = found.setdefault(
                id,
                {
                    "id": id,
                    "due": known.evidence if known else "unknown",
                    "calls": 0,
                    "processes": 0,
                    "states": Counter(),
                    "tested": None,
                    "why": known.why if known else "not a patch of this FlashPatch",
                },
            )
            absent = is_absent(patch["state"], patch.get("detail") or "")
            entry["states"]["not installed" if absent else patch["state"]] += 1
            entry["calls"] += patch["calls"]
            entry["processes"] += bool(patch["calls"])
            entry["tested"] = patch.get("tested") if patch.get("tested") is not None else entry["tested"]
    order = sorted(found.values(), key=lambda entry: (not entry["calls"], entry["id"]))
    return [{**entry, "states": dict(entry["states"])} for entry in order]


def _of_kind(
    events: list[tuple[str, list[dict[str, Any]]]],
    kind: str,
    shown: Callable[[dict[str, Any]], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return what is shown of each event of a kind, with its time and its process, the oldest first."""
    found = [
        {"t": event["t"], "process": process, **shown(event)}
        for process, mine in events
        for event in mine
        if event["event"] == kind
    ]
    return sorted(found, key=lambda one: one["t"])


def _update(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": event.get("role", "target"),
        "outcome": event.get("outcome", "committed"),
        "version": event.get("version"),
        "seconds": event.get("seconds"),
        "load": event.get("load_seconds"),
        "commit": event.get("commit_seconds"),
        "buckets": event.get("buckets"),
    }


def _sync(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": event.get("step"),
        **{name: event.get(f"timing_s/sync/{name}") for name in (*PHASES, "total")},
        "bytes": event.get("sync/bytes"),
        "share": event.get("sync/wire_share"),
        "version": event.get("sync/policy_version"),
    }


def _incidents(
    source: Source,
    named: Mapping[_Key, str],
    events: list[tuple[str, list[dict[str, Any]]]],
    problems: tuple[str, ...],
) -> list[dict[str, Any]]:
    """Return refusals, failed updates, errors and verdicts; those whose time was not recorded have ``t`` None."""
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
    told = {row.error for row in source.run.rows if row.error}
    found += [
        {"t": None, "process": named[row.key], "kind": "error", "text": row.error[:_TEXT]}
        for row in source.run.rows
        if row.error
    ]
    return found + [
        {"t": None, "process": "", "kind": "verdict", "text": problem[:_TEXT]}
        for problem in problems
        if not any(error in problem for error in told)
    ]


def _recorded(source: Source) -> dict[str, int]:
    processes = source.events.values()
    lost = ("dropped", "dropped_samples", "lost", "unreadable")
    return {
        "events": sum(len(process.events) for process in processes),
        "processes": len(processes),
        **{name: sum(getattr(process, name) for process in processes) for name in lost},
    }
