"""Draw what runs found: ``python plot.py OUT.png STEPS NAME=ROLLOUT_DIRECTORY...``.

Reads what verl writes with ``trainer.rollout_data_dir``: a file per step, a line per answer. Draws three
curves per run, each over a window of steps: the reward; how many different right answers there were; and
their effective number per question, ``exp`` of their entropy, which rare ones hardly raise.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, defaultdict
from pathlib import Path

from expressions import RIGHT, plain
from PIL import Image, ImageDraw
from world import TARGETS

PANEL, HEIGHT = 480, 360
INK, PALE = (40, 40, 40), (215, 215, 215)
COLOURS = ((31, 119, 180), (214, 39, 40), (44, 160, 44), (148, 103, 189))
WINDOW = 10  # steps
TOTAL = sum(len(RIGHT[target]) for target in TARGETS)

Answers = dict[str, list[tuple[str, bool]]]


def read(folder: Path, steps: int) -> list[Answers]:
    """Per step, the answers by target, each with whether it is right."""
    found = []
    for step in range(1, steps + 1):
        file = folder / f"{step}.jsonl"
        if not file.exists():
            break
        answers: Answers = defaultdict(list)
        for line in file.read_text().splitlines():
            row = json.loads(line)
            answers[str(row["gts"])].append((plain(row["output"]), row["score"] > 0.5))
        found.append(answers)
    return found


def reward(answers: Answers) -> float:
    """The share of right answers."""
    all_of_them = [right for given in answers.values() for _, right in given]
    return sum(all_of_them) / len(all_of_them)


def effective(window: list[Answers]) -> float:
    """The effective number of right answers per target, ``exp`` of the entropy of those given, averaged."""
    numbers = []
    for target in map(str, TARGETS):
        counts = Counter(text for answers in window for text, right in answers.get(target, ()) if right)
        whole = sum(counts.values())
        if whole:
            numbers.append(math.exp(-sum(n / whole * math.log(n / whole) for n in counts.values())))
    return sum(numbers) / len(numbers) if numbers else 0.0


def distinct(window: list[Answers]) -> int:
    """How many different right answers there are in a window, over all targets."""
    found = {
        (target, text)
        for answers in window
        for target, given in answers.items()
        for text, right in given
        if right
    }
    return len(found)


def windows(steps: list[Answers]) -> list[list[Answers]]:
    """The last few steps at each step; none before there are enough, so that all have the same samples."""
    return [steps[at - WINDOW : at] for at in range(WINDOW, len(steps) + 1)]


def panel(
    draw: ImageDraw.ImageDraw, left: int, title: str, top: float, curves: dict[str, list[float]]
) -> None:
    """One set of axes, starting at zero and at step `WINDOW`."""
    x0, y0, x1, y1 = left + 60, 40, left + PANEL - 20, HEIGHT - 40
    longest = max(len(values) for values in curves.values())
    draw.text((x0, 12), title, fill=INK)
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = y1 - share * (y1 - y0)
        draw.line((x0, y, x1, y), fill=PALE)
        draw.text((left + 8, y - 6), f"{share * top:.3g}", fill=INK)
    draw.text((x0, y1 + 8), f"step {WINDOW}", fill=INK)
    draw.text((x1 - 50, y1 + 8), f"step {longest + WINDOW - 1}", fill=INK)
    for at, (name, values) in enumerate(curves.items()):
        wide = max(1, longest - 1)
        points = [(x0 + i / wide * (x1 - x0), y1 - value / top * (y1 - y0)) for i, value in enumerate(values)]
        if len(points) > 1:
            draw.line(points, fill=COLOURS[at % len(COLOURS)], width=2)
        draw.text((x0 + 8 + 90 * at, y0 + 4), name, fill=COLOURS[at % len(COLOURS)])


def main(out: Path, steps: int, runs: dict[str, Path]) -> None:
    seen = {name: windows(read(folder, steps)) for name, folder in runs.items()}
    if not all(seen.values()):
        raise SystemExit(f"needs {WINDOW} steps of every run")
    rewards = {n: [sum(map(reward, window)) / len(window) for window in all_] for n, all_ in seen.items()}
    spreads = {n: [effective(window) for window in all_] for n, all_ in seen.items()}
    founds = {n: [float(distinct(window)) for window in all_] for n, all_ in seen.items()}
    picture = Image.new("RGB", (3 * PANEL, HEIGHT), "white")
    draw = ImageDraw.Draw(picture)
    panel(draw, 0, f"reward (mean of {WINDOW} steps)", 1.0, rewards)
    panel(draw, PANEL, f"different right answers in {WINDOW} steps, of {TOTAL}", TOTAL, founds)
    most = max(max(values) for values in spreads.values()) * 1.1
    panel(draw, 2 * PANEL, "effective number of right answers per question", most, spreads)
    picture.save(out)
    for name in runs:
        print(
            f"   {name}: reward {rewards[name][0]:.2f} at first, {rewards[name][-1]:.2f} at last; "
            f"different right answers {founds[name][0]:.0f}, then {founds[name][-1]:.0f} of {TOTAL}; "
            f"effective number per question {spreads[name][0]:.1f}, then {spreads[name][-1]:.1f}"
        )
    print(f"   {out}")


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[3:])
    main(Path(sys.argv[1]), int(sys.argv[2]), {name: Path(folder) for name, folder in given.items()})
