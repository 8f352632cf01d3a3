"""Compare the time that two jobs took: ``python speed.py OUT.png STOCK.jsonl OTHER.jsonl``.

Steps are compared one by one: both jobs have had the same prompts. The first step of each is left out, as processes start
in it. Ratios are of seconds per response token for rollouts, which may differ in length, and of seconds for whole steps.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from PIL import Image, ImageDraw

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "verl_cpu"))

from plot import SIZE, panel, smooth  # noqa: E402
from watch import REWARD, read  # noqa: E402

ROLLOUT, STEP, LENGTH = "timing_s/gen", "timing_s/step", "response_length/mean"


def interval(values: list[float]) -> str:
    """The median, and the range that holds the true one in 95 of 100 runs by the sign test (all of it for few values)."""
    ordered = sorted(values)
    out = max(0, int(len(ordered) / 2 - 0.98 * len(ordered) ** 0.5))
    return f"{statistics.median(ordered):.2f} ({ordered[out]:.2f} to {ordered[-1 - out]:.2f})"


def main(out: Path, runs: list[Path]) -> None:
    jobs = {run.stem: [row for row in read(run) if REWARD in row][1:] for run in runs}
    count = min(map(len, jobs.values()))
    jobs = {name: rows[:count] for name, rows in jobs.items()}
    print("   | job | rollouts, s | steps, s | response tokens | reward |")
    print("   | --- | --- | --- | --- | --- |")
    for name, rows in jobs.items():
        spent = [sum(row[what] for row in rows) for what in (ROLLOUT, STEP)]
        length, reward = (statistics.mean(row[what] for row in rows) for what in (LENGTH, REWARD))
        print(f"   | {name} | {spent[0]:.0f} | {spent[1]:.0f} | {length:.1f} | {reward:.2f} |")
    (first, stock), *others = jobs.items()
    for name, rows in others:
        pairs = list(zip(stock, rows, strict=True))
        per_token = [a[ROLLOUT] / a[LENGTH] / (b[ROLLOUT] / b[LENGTH]) for a, b in pairs]
        whole = [a[STEP] / b[STEP] for a, b in pairs]
        print(f"   {first} over {name}: rollouts {interval(per_token)}, steps {interval(whole)}")
    picture = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(picture)
    panel(draw, 0, "seconds of rollout per step", {n: [r[ROLLOUT] for r in rows] for n, rows in jobs.items()})
    panel(
        draw,
        480,
        "reward (mean of 8 steps)",
        {n: smooth([r[REWARD] for r in rows]) for n, rows in jobs.items()},
    )
    picture.save(out)
    print(f"   {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
