"""Draw a job's present state in a terminal, with rich: what the page shows, of the last minutes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flashpatch.commands.report import counted
from flashpatch.verify.live import COLUMNS

_STYLES = {
    **dict.fromkeys(("ok", "proven", "committed"), "green"),
    **dict.fromkeys(("not proven", "missing", "abandoned", "never called"), "red"),
}
_FLEXIBLE = frozenset({"acted in", "process", "text", "line", "measurement"})
"""Columns that are cut if the terminal is narrow."""


def view(found: dict[str, Any], height: int) -> Group:
    """Return what to draw of what `flashpatch.verify.job.collect.job` returns, in a terminal of so many lines; each table gets
    a part of them, and says how many lines it leaves out."""
    rows = max(3, (height - 21 - len(found["names"])) // 3)
    head = Text.assemble(
        ("Job ", "bold"),
        found["run"],
        "  ",
        (found["verdict"], _STYLES.get(found["verdict"], "")),
        f"  {found['alive']} of {counted(len(found['processes']), 'process', 'processes')} alive, "
        f"{counted(len(found['updates']), 'update')}, {counted(len(found['syncs']), 'sync')}, "
        f"{len(found['incidents'])} refusals and problems, "
        f"{_span(found['ended'] - found['began'])} since it began",
    )
    parts = [head, _names(found), _processes(found, rows), _updates(found, rows), _incidents(found, rows)]
    return Group(*parts, *([_measured(found)] if found["charts"] else []))


def _names(found: dict[str, Any]) -> Panel:
    rows = [
        (
            one["name"],
            one["acted"],
            one["calls"],
            ", ".join(map(str, one["versions"])),
            one["precision"],
            one["verdict"],
        )
        for one in found["names"]
    ]
    return _panel("What was switched on", COLUMNS, rows)


def _processes(found: dict[str, Any], most: int) -> Panel:
    held = {lane["process"]: (lane["replica"], lane["segments"][-1]) for lane in found["lanes"]}
    order = sorted(
        (one for one in found["processes"] if one["calls"] or one["verdict"] != "ok"),
        key=lambda one: (one["verdict"] == "ok", one["name"] not in held, held.get(one["name"], (0,))[0]),
    )
    columns, rows = ("process", "replica", "policy", "for", "calls", "memory", "alive", "verdict"), []
    for one in order[:most]:
        replica, segment = held.get(one["name"], ("", None))
        policy = ("", "") if segment is None else (segment[3], _span(segment[1] - segment[0]))
        memory = f"{one['rss_bytes'] / 2**30:.2f} GiB" if one["rss_bytes"] else ""
        state = one["calls"], memory, one["alive"], one["verdict"]
        rows.append((one["name"], replica, *policy, *state))
    idle = len(found["processes"]) - len(order)
    also = f"{idle} that called no patch" if idle else ""
    return _panel("Processes", columns, rows, len(order) - most, also)


def _updates(found: dict[str, Any], most: int) -> Panel:
    columns, rows = ("ended", "process", "outcome", "version", "seconds", "loading", "committing"), []
    for update in found["updates"][::-1][:most]:
        times = (update[name] for name in ("seconds", "load", "commit"))
        numbers = ("" if seconds is None else f"{seconds:.3f}" for seconds in times)
        version = "" if update["version"] is None else update["version"]
        age = f"{_span(found['generated'] - update['t'])} ago"
        rows.append((age, update["process"], update["outcome"], version, *numbers))
    return _panel("Weight updates, newest first", columns, rows, len(found["updates"]) - most)


def _incidents(found: dict[str, Any], most: int) -> Panel:
    rows = []
    for one in found["incidents"][::-1][:most]:
        when = "-" if one["t"] is None else f"{_span(found['generated'] - one['t'])} ago"
        rows.append((when, one["process"], one["kind"], one["text"][:200]))
    left_out = len(found["incidents"]) - most
    return _panel("Refusals and problems, newest first", ("when", "process", "what", "text"), rows, left_out)


def _measured(found: dict[str, Any]) -> Panel:
    rows = [
        (chart["title"], line["label"], f"{line['points'][-1][1]:.4g}", chart["unit"])
        for chart in found["charts"]
        for line in chart["lines"][:2]
    ]
    return _panel("Measurements", ("measurement", "line", "last", "unit"), rows)


def _panel(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[object]], left_out: int = 0, also: str = ""
) -> Panel:
    """Return a table in a frame. What processes wrote is text, whatever rich would take for markup in it."""
    table = Table(box=None, expand=True, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=1 if column in _FLEXIBLE else None)
    for row in rows:
        table.add_row(*(Text(str(one), _STYLES.get(one, ""), overflow="ellipsis") for one in row))
    more = ", and ".join(filter(None, (f"{left_out} more" if left_out > 0 else "", also))) or None
    return Panel(table, title=title, subtitle=more, title_align="left", subtitle_align="left")


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
