"""Report on a profile: one row per tensor, and the table of layers made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from flashpatch.commands.report import Table


@dataclass(frozen=True)
class Row:
    """Hold how well one quantized tensor is reproduced.

    Attributes:
        layer: name of the block it belongs to.
        tensor: its name.
        error: relative error, Frobenius norm of the difference over that of the reference.
        allowed: the largest error that rounding explains.
        equal: share of the 8-bit values that come out the same.
    """

    layer: str
    tensor: str
    error: float
    allowed: float
    equal: float


def table(rows: Sequence[Row]) -> Table:
    """Return one line per layer."""
    lines = []
    for layer in dict.fromkeys(row.layer for row in rows):
        held = [row for row in rows if row.layer == layer]
        worst = max(held, key=lambda row: row.error)
        lines.append(
            (
                layer,
                str(len(held)),
                f"{sum(row.error for row in held) / len(held):.4f}",
                f"{worst.error:.4f}",
                f"{worst.allowed:.4f}",
                f"{100 * sum(row.equal for row in held) / len(held):.1f}%",
                worst.tensor.removeprefix(f"{layer}."),
            )
        )
    heads = ("layer", "tensors", "mean error", "largest error", "allowed", "values equal", "tensor")
    return Table("Reconstruction of the quantized weights", heads, lines, empty="no tensor is quantized")


def as_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows for JSON."""
    return [asdict(row) for row in rows]


@contextmanager
def progress(what: str, total: int) -> Iterator[Any]:
    """Show a progress bar on standard error, if that is a terminal; yields a function that makes one step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
