"""Print reports: tables on a terminal, aligned plain text into a pipe, JSON on request."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

_STYLES = {
    **dict.fromkeys(("live", "holds", "ok", "proven", "committed"), "green"),
    **dict.fromkeys(("installed", "superseded"), "cyan"),
    "failed": "bold red",
    **dict.fromkeys(("displaced", "drifted", "missing", "not proven", "abandoned"), "red"),
    **dict.fromkeys(("skipped", "waiting", "untested"), "yellow"),
    "disabled": "dim",
}


@dataclass(frozen=True)
class Table:
    """Hold rows of text under a title; every row has one cell per column. ``empty`` stands for no rows, "" for the title alone."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str = "none"
    notes: Sequence[str] = ()


def emit(data: Any, tables: Iterable[Table], as_json: bool) -> None:
    """Print ``data`` as JSON, or else ``tables``. Obey NO_COLOR."""
    stream = sys.stdout
    if as_json:
        stream.write(json.dumps(data, indent=2) + "\n")
        return
    if stream.isatty():
        from rich.console import Console

        draw = Console(file=stream).print
    for number, table in enumerate(tables):
        if number:
            stream.write("\n")
        draw(drawn(table)) if stream.isatty() else _plain(table, stream)


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with what it counts: ``1 sync``, ``2 syncs``."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def reader_left() -> int:
    """Drop what is left of standard output, whose reader ended first, as `head` does; return the exit code of that."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _plain(table: Table, stream: TextIO) -> None:
    stream.write(f"{table.title}\n")
    if not table.rows:
        stream.write("".join(f"{line}\n" for line in table.notes or [table.empty] if line))
        return
    lines = [table.columns, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.columns))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        stream.write("  ".join(cells).rstrip() + "\n")
    stream.write("".join(f"{line}\n" for line in table.notes))


def drawn(table: Table, cut: bool = False) -> Any:
    """Return a table as rich draws it, its cells in several lines where the terminal is narrow, or ``cut``."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    if not table.rows:
        lines = [table.title, *(table.notes or [table.empty])]
        return Group(*map(Text, filter(None, lines)))
    made = RichTable(title=Text(table.title), title_justify="left")
    for number, column in enumerate(table.columns):
        # ids and names stay in one piece
        is_name = not number and not any(" " in row[0] for row in table.rows)
        made.add_column(column, overflow="ellipsis" if cut else "fold", no_wrap=cut or is_name)
    for row in table.rows:
        # a cell has the colour of the state it begins with: ``skipped(no vllm)`` of ``skipped``
        made.add_row(*(Text(cell, style=_STYLES.get(cell.partition("(")[0], "")) for cell in row))
    return Group(made, *map(Text, table.notes))
