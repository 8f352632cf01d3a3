"""Draw reward, the trainer's idle time and the age of tokens: ``python plot_stream.py OUT.png SEPARATE STREAM``."""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageDraw
from plot import COLOURS, INK, PALE, panel, smooth
from watch import REWARD, read

SIZE = (960, 720)
IDLE, STEP, UPDATE = "timing_s/gen", "timing_s/step", "timing_s/update_actor"
AGES = [*(f"stream/staleness/{age}" for age in range(4)), "stream/staleness/4_or_more"]


def timeline(
    draw: ImageDraw.ImageDraw, top: int, name: str, rows: list[dict[str, float]], seconds: float
) -> None:
    """One job's time from left to right: training dark, waiting for samples pale; a line where a step ends."""
    x0, x1, y0, y1 = 60, SIZE[0] - 20, top + 22, top + 60
    scale, at = (x1 - x0) / seconds, 0.0
    total = sum(row[STEP] for row in rows)
    idle = sum(row[IDLE] for row in rows)
    draw.text(
        (x0, top), f"{name}: {total:.0f} s, the trainer idle for {idle:.0f} s ({idle / total:.0%})", fill=INK
    )
    for row in rows:
        begin, middle, end = (x0 + scale * (at + part) for part in (0, min(row[IDLE], row[STEP]), row[STEP]))
        draw.rectangle((begin, y0, middle, y1), fill=PALE)
        draw.rectangle((middle, y0, end, y1), fill=COLOURS[0])
        draw.line((end, y0 - 3, end, y1 + 3), fill=INK)
        at += row[STEP]


def histogram(draw: ImageDraw.ImageDraw, left: int, top: int, rows: list[dict[str, float]]) -> None:
    """How old the tokens were that the streaming job trained on, in versions of the policy."""
    x0, y0, y1 = left + 60, top + 30, top + 250
    draw.text((x0, top), "share of tokens by age, in versions of the policy", fill=INK)
    for at, name in enumerate(AGES):
        share = sum(row.get(name, 0.0) for row in rows) / len(rows)
        x = x0 + 76 * at
        draw.rectangle((x, y1 - share * (y1 - y0), x + 56, y1), fill=COLOURS[2])
        draw.text((x + 4, y1 - share * (y1 - y0) - 14), f"{share:.0%}", fill=INK)
        draw.text((x + 18, y1 + 6), "4 or more" if at == 4 else str(at), fill=INK)


def main(out: Path, runs: list[Path]) -> None:
    jobs = {run.stem: [row for row in read(run) if REWARD in row] for run in runs}
    picture = Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(picture)
    panel(
        draw,
        0,
        "reward (mean of 8 steps)",
        {name: smooth([row[REWARD] for row in rows]) for name, rows in jobs.items()},
    )
    histogram(draw, 480, 20, jobs["stream_async"])
    later = {name: rows[1:] for name, rows in jobs.items()}  # the first step waits for processes that start
    longest = max(sum(row[STEP] for row in rows) for rows in later.values())
    for at, (name, rows) in enumerate(later.items()):
        timeline(draw, 400 + 110 * at, name, rows, longest)
    draw.text(
        (60, 630),
        "pale: the trainer waits for samples; dark: it trains or sends weights; from the second step on",
        fill=INK,
    )
    picture.save(out)
    for name, rows in later.items():
        total, idle = (sum(row[what] for row in rows) for what in (STEP, IDLE))
        late = [row[REWARD] for row in jobs[name]][-max(1, len(jobs[name]) // 4) :]
        print(f"   {name}: {total:.1f} s for {len(rows)} steps, trainer idle {idle:.1f} s;", end=" ")
        print(f"reward {sum(late) / len(late):.2f} in the last quarter")
    print(f"   {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
