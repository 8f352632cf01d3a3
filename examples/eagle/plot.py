"""Draw and sum up what `rollouts.py` found: ``python plot.py DIRECTORY``."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from PIL import Image, ImageDraw

INK, PALE, GREY = (40, 40, 40), (215, 215, 215), (150, 150, 150)
COLOURS = {"frozen": (214, 39, 40), "co-trained": (31, 119, 180), "bandit": (148, 103, 189), "none": GREY}
SHADES = {
    "disable": (200, 200, 200),
    "1_1_2": (198, 219, 239),
    "2_1_3": (133, 188, 220),
    "3_1_4": (66, 146, 198),
    "4_1_5": (8, 81, 156),
}
WIDE, HIGH = 480, 340
Row = dict[str, Any]
Points = list[tuple[float, float]]


class Panel:
    """A pair of axes in a picture, the upper one from 0 to ``top``."""

    def __init__(
        self, draw: ImageDraw.ImageDraw, left: int, up: int, title: str, top: float, wide: int = WIDE
    ) -> None:
        self.draw, self.top = draw, top
        self.x0, self.y0, self.x1, self.y1 = left + 55, up + 40, left + wide - 20, up + HIGH - 45
        draw.text((self.x0, up + 14), title, fill=INK)
        for share in (0, 0.25, 0.5, 0.75, 1):
            draw.line((self.x0, self.y(share * top), self.x1, self.y(share * top)), fill=PALE)
            draw.text((left + 8, self.y(share * top) - 6), f"{share * top:.3g}", fill=INK)

    def y(self, value: float) -> float:
        return self.y1 - value / self.top * (self.y1 - self.y0)

    def below(self, x: float, text: str, line: int = 0) -> None:
        """Text centred under a place of the lower axis."""
        self.draw.text((x - 3 * len(text), self.y1 + 6 + 14 * line), text, fill=INK)

    def curve(self, points: Points, first: float, last: float, colour: tuple, name: str, line: int) -> None:
        wide = (self.x1 - self.x0) / max(1e-9, last - first)
        places = [(self.x0 + (x - first) * wide, self.y(y)) for x, y in points]
        self.draw.line(places, fill=colour, width=2)
        for x, y in places:
            self.draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)
        self.draw.text((self.x0 + 8, self.y0 + 6 + 14 * line), name, fill=colour)

    def bar(self, left: float, right: float, low: float, high: float, colour: tuple) -> None:
        self.draw.rectangle((left, self.y(high), right, self.y(low)), fill=colour)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def acceptance(runs: dict[str, list[Row]], out: Path) -> None:
    """Acceptance length and tokens per second by round, both drafters."""
    measured = {name: [row for row in rows if row["what"] == "measured"] for name, rows in runs.items()}
    rounds = [row["round"] for rows in measured.values() for row in rows]
    first, last = min(rounds), max(rounds)
    picture = Image.new("RGB", (2 * WIDE, HIGH), "white")
    draw = ImageDraw.Draw(picture)
    [batch] = {row["batch"] for rows in runs.values() for row in rows if row["what"] == "none"}
    lengths = Panel(draw, 0, 0, "acceptance length, 4 drafts at every step", 5)
    none = _mean(runs, "none", batch)
    rates = {name: _at(runs[name], "bandit", batch) for name in runs}
    most = max(y for points in (*rates.values(), none) for _, y in points)
    speeds = Panel(draw, WIDE, 0, f"tokens per processor second, batch {batch}, with the bandit", most * 1.3)
    for line, name in enumerate(measured):
        points = [(row["round"], row["length"]) for row in measured[name]]
        lengths.curve(points, first, last, COLOURS[name], name, line)
        speeds.curve(rates[name], 0, last, COLOURS[name], name, line)
    speeds.curve(none, 0, last, GREY, "no speculation", 2)
    zero = lengths.x0 - first / max(1, last - first) * (lengths.x1 - lengths.x0)
    draw.line((zero, lengths.y0, zero, lengths.y1), fill=GREY)
    lengths.below(zero, "the policy drifts from here on")
    lengths.below(lengths.x1 - 20, f"round {last}")
    speeds.below(speeds.x0 + 20, "round 0")
    speeds.below(speeds.x1 - 20, f"round {last}")
    picture.save(out)


def arms(runs: dict[str, list[Row]], out: Path) -> None:
    """The bandit's arms by round, a panel per batch size."""
    batches = sorted({row["batch"] for rows in runs.values() for row in rows if row["what"] == "bandit"})
    wide = 300
    picture = Image.new("RGB", (wide * len(batches), HIGH * len(runs) + 20), "white")
    draw = ImageDraw.Draw(picture)
    for down, (name, rows) in enumerate(runs.items()):
        for across, batch in enumerate(batches):
            title = f"{name}, batch {batch}: share of steps"
            panel = Panel(draw, across * wide, down * HIGH, title, 1, wide)
            found = [row for row in rows if row["what"] == "bandit" and row["batch"] == batch]
            each = (panel.x1 - panel.x0) / max(1, len(found))
            for place, row in enumerate(found):
                low, total = 0.0, sum(row["chosen"].values()) or 1
                for arm, colour in SHADES.items():
                    high = low + row["chosen"].get(arm, 0) / total
                    left = panel.x0 + place * each
                    panel.bar(left + 1, left + each - 1, low, high, colour)
                    low = high
            panel.below(panel.x0 + each / 2, "0")
            panel.below(panel.x1 - each / 2, str(found[-1]["round"]))
            panel.below((panel.x0 + panel.x1) / 2, "round")
    x = 60
    for arm, colour in SHADES.items():
        draw.rectangle((x, picture.height - 20, x + 12, picture.height - 8), fill=colour)
        draw.text((x + 18, picture.height - 20), _name(arm), fill=INK)
        x += 110
    picture.save(out)


def speed(rows: list[Row], out: Path) -> None:
    """Tokens per processor second by batch size: no speculation, every fixed arm, the bandit."""
    found = [row for row in rows if row["what"] == "speed"]
    batches = sorted({row["batch"] for row in found})
    names = list(dict.fromkeys(row["arm"] for row in found))
    none = {row["batch"]: row["rate"] for row in found if row["arm"] == "disable"}
    picture = Image.new("RGB", (2 * WIDE, HIGH), "white")
    draw = ImageDraw.Draw(picture)
    top = max(row["rate"] / none[row["batch"]] for row in found) * 1.15
    panel = Panel(draw, 0, 0, "tokens per processor second, over those without speculation", top, 2 * WIDE)
    group = (panel.x1 - panel.x0) / len(batches)
    each = group / (len(names) + 1.5)
    for row in found:
        left = panel.x0 + batches.index(row["batch"]) * group + (names.index(row["arm"]) + 0.75) * each
        colour = SHADES.get(row["arm"], COLOURS["bandit"])
        panel.bar(left, left + each - 3, 0, row["rate"] / none[row["batch"]], colour)
        draw.text((left, panel.y(row["rate"] / none[row["batch"]]) - 13), f"{row['rate']:.0f}", fill=INK)
    for place, batch in enumerate(batches):
        panel.below(panel.x0 + (place + 0.5) * group, f"batch {batch}")
    x = panel.x0
    for name in names:
        draw.rectangle((x, HIGH - 18, x + 12, HIGH - 6), fill=SHADES.get(name, COLOURS["bandit"]))
        draw.text((x + 18, HIGH - 18), _name(name), fill=INK)
        x += 120
    picture.save(out)


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
    unlike, total = (sum(row[name] for row in speeds) for name in ("unlike", "answers"))
    print(f"   {unlike} of {total} greedy answers unlike those without speculation")


def _name(arm: str) -> str:
    if arm in ("disable", "bandit"):
        return {"disable": "no speculation", "bandit": "the bandit"}[arm]
    return f"{arm[0]} draft" if arm[0] == "1" else f"{arm[0]} drafts"


def _at(rows: list[Row], what: str, batch: int) -> Points:
    return [(row["round"], row["rate"]) for row in rows if row["what"] == what and row["batch"] == batch]


def _mean(runs: dict[str, list[Row]], what: str, batch: int) -> Points:
    """Of both runs, which do the same there."""
    each = [_at(rows, what, batch) for rows in runs.values()]
    return [(points[0][0], fmean(y for _, y in points)) for points in zip(*each, strict=True)]


def main(out: Path) -> None:
    runs = {name: read(out / f"{name}.jsonl") for name in ("frozen", "co-trained")}
    said(runs)
    acceptance(runs, out / "eagle_acceptance.png")
    arms(runs, out / "eagle_arms.png")
    speed(runs["co-trained"], out / "eagle_speed.png")
    for name in ("acceptance", "arms", "speed"):
        print(f"   {out / f'eagle_{name}.png'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
