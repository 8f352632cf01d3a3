"""Compare the time that two jobs took: ``python speed.py OUT.png STOCK.jsonl OTHER.jsonl``.

Steps are compared one by one: both jobs have had the same prompts. The first step of each is left out, as processes start
in it. Ratios are of seconds per response token for rollouts, which may differ in length, and of seconds for whole steps.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent), str(HERE.parent / "verl_cpu")]

from pictures import finish  # noqa: E402
from watch import REWARD, read  # noqa: E402

ROLLOUT, STEP, LENGTH = "timing_s/gen", "timing_s/step", "response_length/mean"


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median, and the range that holds the true one in 95 of 100 runs by the sign test (all of it for few values)."""
    ordered = sorted(values)
    out = max(0, int(len(ordered) / 2 - 0.98 * len(ordered) ** 0.5))
    return statistics.median(ordered), ordered[out], ordered[-1 - out]


def main(out: Path, stock: Path, other: Path) -> None:
    jobs = {run.stem: [row for row in read(run) if REWARD in row][1:] for run in (stock, other)}
    count = min(map(len, jobs.values()))
    jobs = {name: rows[:count] for name, rows in jobs.items()}
    print("   | job | rollouts, s | steps, s | response tokens | reward |")
    print("   | --- | --- | --- | --- | --- |")
    for name, rows in jobs.items():
        spent = [sum(row[what] for row in rows) for what in (ROLLOUT, STEP)]
        length, reward = (statistics.mean(row[what] for row in rows) for what in (LENGTH, REWARD))
        print(f"   | {name} | {spent[0]:.0f} | {spent[1]:.0f} | {length:.1f} | {reward:.2f} |")
    (first, one), (second, two) = jobs.items()
    pairs = list(zip(one, two, strict=True))
    per_token = [a[ROLLOUT] / a[LENGTH] / (b[ROLLOUT] / b[LENGTH]) for a, b in pairs]
    whole = interval([a[STEP] / b[STEP] for a, b in pairs])
    ratio = interval(per_token)
    said = ["{:.2f} ({:.2f} to {:.2f})".format(*found) for found in (ratio, whole)]
    print(f"   {first} over {second}: rollouts {said[0]}, steps {said[1]}")
    numbers = {
        "picture": "times of two jobs",
        "jobs": {
            name: {"rollout_s": [row[ROLLOUT] for row in rows], "reward": [row[REWARD] for row in rows]}
            for name, rows in jobs.items()
        },
        "ratio": {"values": per_token, **dict(zip(("median", "low", "high"), ratio, strict=True))},
    }
    finish({out: numbers})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
