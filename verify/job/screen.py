"""Show a job's present state in tables for a terminal: what the page shows, of the last minutes."""

from __future__ import annotations

from typing import Any

from flashpatch.commands.report import Table, counted
from flashpatch.verify.live import COLUMNS


def view(found: dict[str, Any], height: int) -> list[Table]:
    """Return what to draw of what `flashpatch.verify.job.collect.job` returns, in a terminal of so many lines; each table gets
    a part of them, and says how many lines it leaves out."""
    most = max(3, (height - 24 - len(found["names"])) // 3)
    head = (
        f"Job {found['run']}  {found['verdict']}, {found['how'] or 'ended'}  "
        f"{found['alive']} of {counted(len(found['processes']), 'process', 'processes')} alive, "
        f"{counted(len(found['updates']), 'update')}, {counted(len(found['syncs']), 'sync')}, "
        f"{counted(len(found['incidents']), 'refusal or problem', 'refusals and problems')}, "
        f"{span(found['ended'] - found['began'])} since it began"
    )
    names = Table("What was switched on", COLUMNS, [one["cells"] for one in found["names"]])
    parts = [names, _processes(found, most), _updates(found, most), _incidents(found, most)]
    return [Table(head, (), (), ""), *parts, *([_measured(found)] if found["charts"] else [])]


def _processes(found: dict[str, Any], most: int) -> Table:
    held = {lane["process"]: (lane["replica"], lane["segments"][-1]) for lane in found["lanes"]}
    order = sorted(
        (one for one in found["processes"] if one["calls"] or one["verdict"] != "ok"),
        key=lambda one: (one["verdict"] == "ok", one["name"] not in held, held.get(one["name"], (0,))[0]),
    )
    columns, rows = ("process", "replica", "policy", "for", "calls", "memory", "ended", "verdict"), []
    for one in order[:most]:
        replica, segment = held.get(one["name"], ("", None))
        policy = ("", "") if segment is None else (str(segment[3]), span(segment[1] - segment[0]))
        memory = f"{one['rss_bytes'] / 2**30:.2f} GiB" if one["rss_bytes"] else ""
        state = str(one["calls"]), memory, one["how"], one["verdict"]
        rows.append((one["name"], str(replica), *policy, *state))
    idle = len(found["processes"]) - len(order)
    notes = [f"{idle} that called no patch"] if idle else []
    return Table("Processes", columns, rows, notes=[*_more(order, most), *notes])


def _updates(found: dict[str, Any], most: int) -> Table:
    columns, rows = ("ended", "process", "outcome", "version", "seconds", "loading", "committing"), []
    for update in found["updates"][::-1][:most]:
        times = (update[name] for name in ("seconds", "load", "commit"))
        numbers = ("" if seconds is None else f"{seconds:.3f}" for seconds in times)
        version = "" if update["version"] is None else str(update["version"])
        age = f"{span(found['generated'] - update['t'])} ago"
        rows.append((age, update["process"], update["outcome"], version, *numbers))
    return Table("Weight updates, newest first", columns, rows, notes=_more(found["updates"], most))


def _incidents(found: dict[str, Any], most: int) -> Table:
    rows = []
    for one in found["incidents"][::-1][:most]:
        when = "-" if one["t"] is None else f"{span(found['generated'] - one['t'])} ago"
        rows.append((when, one["process"], one["kind"], one["text"][:200]))
    columns = ("when", "process", "what", "text")
    return Table("Refusals and problems, newest first", columns, rows, notes=_more(found["incidents"], most))


def _measured(found: dict[str, Any]) -> Table:
    rows = [
        (chart["title"], line["label"], f"{line['points'][-1][1]:.4g}", chart["unit"])
        for chart in found["charts"]
        for line in chart["lines"][:2]
    ]
    return Table("Measurements", ("measurement", "line", "last", "unit"), rows)


def _more(things: list[Any], shown: int) -> list[str]:
    return [f"{len(things) - shown} more"] if len(things) > shown else []


def span(seconds: float) -> str:
    """Return a duration as a person would say it."""
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
