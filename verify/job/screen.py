"""Draw a job's present state in a terminal, with rich: what the page shows, of the last minutes."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flashpatch.commands.report import counted

_STYLES = {
    **dict.fromkeys(("ok", "proven", "committed"), "green"),
    **dict.fromkeys(("not proven", "missing", "abandoned"), "red"),
}
_FLEXIBLE = frozenset({"acted in", "process", "text", "line", "measurement"})
"""Columns that are cut if the terminal is narrow."""


def view(found: dict[str, Any], height: int) -> Group:
    """Return what to draw.

    Args:
        found: what `flashpatch.verify.job.collect.job` returns.
        height: lines of the terminal; each table gets a part of them, and says how many lines it leaves out.
    """
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
    table = _table("name", "acted in", "calls", "policy versions", "precision", "verdict")
    for one in found["names"]:
        versions = ", ".join(map(str, one["versions"]))
        _add(
            table, one["name"], one["acted"], one["calls"], versions, one["precision"], _word(one["verdict"])
        )
    return _panel("What was switched on", table, 0)


def _processes(found: dict[str, Any], rows: int) -> Panel:
    held = {lane["process"]: (lane["replica"], lane["segments"][-1]) for lane in found["lanes"]}
    order = sorted(
        (one for one in found["processes"] if one["calls"] or one["verdict"] != "ok"),
        key=lambda one: (one["verdict"] == "ok", one["name"] not in held, held.get(one["name"], (0,))[0]),
    )
    table = _table("process", "replica", "policy", "for", "calls", "memory", "alive", "verdict")
    for one in order[:rows]:
        replica, segment = held.get(one["name"], ("", None))
        policy = ("", "") if segment is None else (segment[3], _span(segment[1] - segment[0]))
        memory = f"{one['rss_bytes'] / 2**30:.2f} GiB" if one["rss_bytes"] else ""
        _add(table, one["name"], replica, *policy, one["calls"], memory, one["alive"], _word(one["verdict"]))
    idle = len(found["processes"]) - len(order)
    return _panel("Processes", table, len(order) - rows, f"{idle} that called no patch" if idle else "")


def _updates(found: dict[str, Any], rows: int) -> Panel:
    table = _table("ended", "process", "outcome", "version", "seconds", "loading", "committing")
    for update in found["updates"][::-1][:rows]:
        numbers = (
            f"{update[name]:.3f}" if update[name] is not None else ""
            for name in ("seconds", "load", "commit")
        )
        version = "" if update["version"] is None else update["version"]
        age = f"{_span(found['generated'] - update['t'])} ago"
        _add(table, age, update["process"], _word(update["outcome"]), version, *numbers)
    return _panel("Weight updates, newest first", table, len(found["updates"]) - rows)


def _incidents(found: dict[str, Any], rows: int) -> Panel:
    table = _table("when", "process", "what", "text")
    for one in found["incidents"][::-1][:rows]:
        when = "-" if one["t"] is None else f"{_span(found['generated'] - one['t'])} ago"
        _add(table, when, one["process"], Text(one["kind"], "red"), one["text"][:200])
    return _panel("Refusals and problems, newest first", table, len(found["incidents"]) - rows)


def _measured(found: dict[str, Any]) -> Panel:
    """Return the last value of each measurement."""
    table = _table("measurement", "line", "last", "unit")
    for chart in found["charts"]:
        for line in chart["lines"][:2]:
            _add(table, chart["title"], line["label"], f"{line['points'][-1][1]:.4g}", chart["unit"])
    return _panel("Measurements", table, 0)


def _table(*columns: str) -> Table:
    table = Table(box=None, expand=True, pad_edge=False)
    for column in columns:
        flexible = column in _FLEXIBLE
        table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=1 if flexible else None)
    return table


def _add(table: Table, *cells: object) -> None:
    """Add a row. What processes wrote is text, whatever rich would take for markup in it."""
    texts = (cell if isinstance(cell, Text) else Text(str(cell), overflow="ellipsis") for cell in cells)
    table.add_row(*texts)


def _panel(title: str, table: Table, left_out: int, also: str = "") -> Panel:
    more = ", and ".join(filter(None, (f"{left_out} more" if left_out > 0 else "", also))) or None
    return Panel(table, title=title, subtitle=more, title_align="left", subtitle_align="left")


def _word(word: str) -> Text:
    return Text(word, _STYLES.get(word, ""))


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"
