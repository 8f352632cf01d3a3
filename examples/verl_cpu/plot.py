"""Draw reward and rollout/trainer mismatch of several runs: ``python plot.py OUT.png RUN.jsonl...``."""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageDraw
from watch import MISMATCH, REWARD, read

SIZE = (960, 360)
INK, PALE = (40, 40, 40), (215, 215, 215)
COLOURS = ((31, 119, 180), (214, 39, 40), (44, 160, 44), (148, 103, 189))
SMOOTH = 8  # steps in the running mean


def smooth(values: list[float]) -> list[float]:
    """The mean of the last few values at each step."""
    windows = (values[max(0, at - SMOOTH + 1) : at + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def panel(draw: ImageDraw.ImageDraw, left: int, title: str, curves: dict[str, list[float]]) -> None:
    """One set of axes, 480 pixels wide, starting at zero."""
    x0, y0, x1, y1 = left + 60, 40, left + 460, SIZE[1] - 40
    top = max((max(values) for values in curves.values()), default=1) * 1.1 or 1
    longest = max(len(values) for values in curves.values())
    draw.text((x0, 12), title, fill=INK)
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = y1 - share * (y1 - y0)
        draw.line((x0, y, x1, y), fill=PALE)
        draw.text((left + 8, y - 6), f"{share * top:.3g}", fill=INK)
    draw.text((x0, y1 + 8), "step 1", fill=INK)
    draw.text((x1 - 50, y1 + 8), f"step {longest}", fill=INK)
    for (name, values), colour in zip(curves.items(), COLOURS, strict=False):
        wide = max(1, longest - 1)
        points = [(at / wide, value / top) for at, value in enumerate(values)]
        draw.line([(x0 + x * (x1 - x0), y1 - y * (y1 - y0)) for x, y in points], fill=colour, width=2)
        draw.text((x1 - 60, y1 - 18 - 14 * list(curves).index(name)), name, fill=colour)


def main(out: Path, runs: list[Path]) -> None:
    metrics = {run.stem: [row for row in read(run) if REWARD in row] for run in runs}
    picture = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(picture)
    rewards = {name: smooth([row[REWARD] for row in rows]) for name, rows in metrics.items()}
    mismatches = {name: [row[MISMATCH] for row in rows] for name, rows in metrics.items()}
    panel(draw, 0, f"reward (mean of {SMOOTH} steps)", rewards)
    panel(draw, 480, "mean |p(rollout) - p(trainer)|", mismatches)
    picture.save(out)
    for name, rows in metrics.items():
        gained = [row[REWARD] for row in rows]
        part = max(1, len(gained) // 4)
        first, last = sum(gained[:part]) / part, sum(gained[-part:]) / part
        print(f"   {name}: reward {first:.2f} in the first quarter, {last:.2f} in the last;", end=" ")
        print(f"mismatch at most {max(mismatches[name]):.4f}")
    print(f"   {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
