"""Draw and sum up what `rollouts.py` found: ``python plot.py DIRECTORY``."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))

from pictures import Numbers, finish  # noqa: E402

Row = dict[str, Any]
Points = list[tuple[int, float]]
DRAFTS = 4  # per step at most, as in rollouts.py


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def acceptance(runs: dict[str, list[Row]]) -> Numbers:
    """Acceptance length and tokens per second by round, both drafters."""
    [batch] = {row["batch"] for rows in runs.values() for row in rows if row["what"] == "none"}
    measured = {name: [row for row in rows if row["what"] == "measured"] for name, rows in runs.items()}
    return {
        "picture": "acceptance by round",
        "drafts": DRAFTS,
        "batch": batch,
        "length": {name: [(row["round"], row["length"]) for row in rows] for name, rows in measured.items()},
        "rate": {name: _at(rows, "bandit", batch) for name, rows in runs.items()},
        "none": _mean(runs, "none", batch),
    }


def arms(runs: dict[str, list[Row]]) -> Numbers:
    """Steps of each of the bandit's arms by round, by drafter and batch size."""
    chosen: dict[str, dict[int, list[dict[str, int]]]] = {}
    for name, rows in runs.items():
        by_batch = chosen[name] = defaultdict(list)
        for row in rows:
            if row["what"] == "bandit":
                by_batch[row["batch"]].append(row["chosen"])
    return {"picture": "arms by round", "chosen": chosen}


def speed(rows: list[Row]) -> Numbers:
    """Tokens per processor second of each turn by batch size: no speculation, every fixed arm, the bandit."""
    rates: dict[int, dict[str, list[float]]] = defaultdict(dict)
    for row in rows:
        if row["what"] == "speed":
            rates[row["batch"]][row["arm"]] = row["rates"]
    return {"picture": "speed by arm", "rates": rates}


def said(runs: dict[str, list[Row]]) -> None:
    """The figures behind the pictures."""
    from flashpatch.commands.report import Table, emit

    by_round: dict[int, dict[str, Row]] = defaultdict(dict)
    for name, rows in runs.items():
        for row in rows:
            if row["what"] == "measured":
                by_round[row["round"]][name] = row
    lines = []
    for number, found in sorted(by_round.items()):
        cells = [f"{found[name]['length']:.2f}" if name in found else "" for name in runs]
        lines.append(
            [str(number), *cells, *(f"{found[name]['rate']:.0f}" if name in found else "" for name in runs)]
        )
    columns = ["round", *(f"{name}: length" for name in runs), *(f"{name}: tokens/s" for name in runs)]
    tables = [Table("4 drafts at every step, by round; before round 0 the drafter starts", columns, lines)]
    speeds = [row for row in runs["co-trained"] if row["what"] == "speed"]
    names = list(dict.fromkeys(row["arm"] for row in speeds))
    lines = []
    for batch in sorted({row["batch"] for row in speeds}):
        rates = {row["arm"]: row["rate"] for row in speeds if row["batch"] == batch}
        best = max(rate for name, rate in rates.items() if name != "bandit")
        lines.append([str(batch), *(f"{rates[name]:.0f}" for name in names), f"{rates['bandit'] / best:.3f}"])
    columns = ["batch", *names, "bandit of best"]
    tables.append(Table("tokens per processor second, greedy, last policy", columns, lines))
    emit(None, tables, False)
    unlike, total = (sum(row[name] for row in speeds) for name in ("unlike", "compared"))
    print(f"   {unlike} of {total} greedy answers unlike those without speculation")


def _at(rows: list[Row], what: str, batch: int) -> Points:
    return [(row["round"], row["rate"]) for row in rows if row["what"] == what and row["batch"] == batch]


def _mean(runs: dict[str, list[Row]], what: str, batch: int) -> Points:
    """Of both runs, which do the same there."""
    each = [_at(rows, what, batch) for rows in runs.values()]
    return [(points[0][0], fmean(y for _, y in points)) for points in zip(*each, strict=True)]


def main(out: Path) -> None:
    runs = {name: read(out / f"{name}.jsonl") for name in ("frozen", "co-trained")}
    said(runs)
    numbers = {"acceptance": acceptance(runs), "arms": arms(runs), "speed": speed(runs["co-trained"])}
    finish({out / f"eagle_{name}.png": found for name, found in numbers.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
