"""Step times that `record_steps.py` measured, and how far the simulator is from the rollouts measured with them."""

from __future__ import annotations

import json
from bisect import bisect_left
from pathlib import Path
from typing import Any

from .rollout import Drafting, StepCost, simulate


class Measured:
    """Tell step times by interpolation between measured batch sizes, and by their ratio to the nearest beyond them."""

    def __init__(self, steps: list[dict[str, Any]], prompt_seconds: float) -> None:
        self._tables: dict[int, list[tuple[int, float]]] = {}
        for row in sorted(steps, key=lambda row: row["batch"]):
            self._tables.setdefault(row["drafts"], []).append((row["batch"], row["seconds"]))
        self._prompt = prompt_seconds

    def prompt(self, tokens: int) -> float:
        return self._prompt

    def step(self, batch: float, cost: StepCost, context: float) -> float:
        """Return the seconds of a step; the context, which was short, does not matter."""
        table = self._tables[round(cost.verified)]
        at = bisect_left(table, (batch, 0.0))
        if at == len(table):
            return table[-1][1]
        size, seconds = table[at]
        if at == 0 or size == batch:
            return seconds
        low, before = table[at - 1]
        return before + (seconds - before) * (batch - low) / (size - low)


def compare(path: Path) -> list[dict[str, Any]]:
    """Return, by number of drafts, seconds measured and simulated and the relative error."""
    said = json.loads(path.read_text())
    found = []
    for rollout in said["rollouts"]:
        drafts = rollout["drafts"]
        rows = [row for row in said["steps"] if row["drafts"] == drafts]
        steps = sum(row["steps"] for row in rows)
        gained = sum(row["tokens"] * row["steps"] for row in rows) / steps
        way = Drafting(StepCost(drafts, drafts), gained)
        times = Measured(said["steps"], said["prompt_seconds"])
        simulated = simulate(times, [way], said["lengths"], said["slots"], 0).seconds
        error = simulated / rollout["seconds"] - 1.0
        found.append(
            {"drafts": drafts, "gained": gained, "measured": rollout["seconds"], "simulated": simulated}
            | {"range": rollout["range"], "error": error}
        )
    return found
