"""What the lane has found, a row per case, printed at its end."""

from io import StringIO

from rich.console import Console
from rich.table import Table

ROWS: list[tuple[str, str, str, str, str]] = []
_COLUMNS = ("what", "device", "case", "kernel", "found")


def add(what: str, capability: int, case: str, kernel: str, found: str) -> None:
    """Note a case; ``kernel`` and ``found`` in words."""
    ROWS.append((what, f"{capability / 10:.1f}", case, kernel, found))


def text() -> str:
    """Return the table."""
    table = Table(*_COLUMNS)
    for row in sorted(ROWS):
        table.add_row(*row)
    out = StringIO()
    Console(file=out, width=160).print(table)
    return out.getvalue()
