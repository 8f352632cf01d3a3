"""Runs of one job under several fixed arms, put side by side; see `bandit_traces.py` for the format."""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

Row = tuple[float, float]  # tokens per row, seconds


def middle(runs: list[list[Row]]) -> list[Row]:
    """Step by step the median time; greedy runs have the same steps, but for the last."""
    length = min(map(len, runs))
    return [(runs[0][at][0], statistics.median(run[at][1] for run in runs)) for at in range(length)]


def line_up(series: dict[Any, list[Row]], batch: int) -> list[dict[str, Any]]:
    """One line per token of a row, with the step of each arm that spans it."""
    spans = {arm: _spans(rows) for arm, rows in series.items()}
    length = min(map(len, spans.values()))
    return [
        {"batch": batch, "arms": {str(arm): _pair(rows[at], batch) for arm, rows in spans.items()}}
        for at in range(length)
    ]


def fours(spent: list[float]) -> list[float]:
    """Seconds of a step, over four steps each: so that steady steps and changing ones have the same kind of noise."""
    return [sum(spent[at : at + 4]) / 4 for at in range(0, len(spent) - 3, 4)]


def write(out: Path, source: str, switch: float, lines: list[dict[str, Any]]) -> None:
    """Write what there is of a trace."""
    head = {"source": source, "switch_seconds": round(switch, 6)}
    with (gzip.open if out.suffix == ".gz" else open)(out, "wt") as file:
        for row in (head, *lines):
            file.write(json.dumps(row) + "\n")


def _pair(row: Row, batch: int) -> list[float]:
    return [round(row[0] * batch), round(row[1], 6)]


def _spans(rows: list[Row]) -> list[Row]:
    found: list[Row] = []
    reached = 0.0
    for tokens, seconds in rows:
        reached += tokens
        found += [(tokens, seconds)] * (int(reached) - len(found))
    return found
