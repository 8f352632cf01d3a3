"""Print what runs found: mean and 95 % interval of the mean over seeds. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

LEVEL = 0.9  # reward at which answers are counted, so that methods of different speed compare
QUANTILES = {2: 12.71, 3: 4.30, 8: 2.36, 16: 2.13}
"""Student's t for 95 %, by number of seeds; 2 for other numbers."""

HEADINGS = {
    "comparison": "expressions (110 right answers to 8 prompts), each row at the best of its learning rates",
    "terms": "expressions: which term keeps FlowRL from its target; beta 5",
    "strings": "strings of 1 to 8 letters, 60 palindromes, graded reward",
    "transformer": "a transformer on the expressions, log Z by the package's network; beta 5 unless named",
}
COLUMNS = (
    "reward",
    "effective number",
    f"at reward {LEVEL:g}",
    "TV to target",
    "KL to target",
    "least TV",
    "at b",
)

Result = dict[str, Any]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95 % interval."""
    number = len(values)
    mean = math.fsum(values) / number
    if number < 2:
        return mean, math.nan
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (number - 1))
    return mean, QUANTILES.get(number, 2.0) * deviation / math.sqrt(number)


def last(result: Result, name: str) -> list[float]:
    """The measure at the end, per seed."""
    return [curve[-1] for curve in result["curves"][name]]


def at_level(result: Result) -> list[float]:
    """The effective number where each seed's reward first passes `LEVEL`, between two measurements in
    proportion; seeds that never do are left out."""
    found = []
    for rewards, numbers in zip(result["curves"]["reward"], result["curves"]["effective"], strict=True):
        for at in range(1, len(rewards)):
            if rewards[at] >= LEVEL > rewards[at - 1]:
                share = (LEVEL - rewards[at - 1]) / (rewards[at] - rewards[at - 1])
                found.append(numbers[at - 1] + share * (numbers[at] - numbers[at - 1]))
                break
    return found


def best_rates(results: list[Result]) -> list[Result]:
    """Keep of each row the learning rate with the most right answers at reward `LEVEL`, or, where no rate gets
    there, the highest reward."""
    rows: dict[str, list[Result]] = {}
    for result in results:
        rows.setdefault(result["method"]["name"].partition(" @ ")[0], []).append(result)

    def rank(result: Result) -> tuple[bool, float]:
        found = at_level(result)
        there = len(found) == len(result["curves"]["reward"])
        return there, interval(found if there else last(result, "reward"))[0]

    return [max(tried, key=rank) for tried in rows.values()]


def tables(results: list[Result]) -> str:
    """All tables as text."""
    return "\n\n".join(table(part, of_part(results, part)) for part in HEADINGS)


def of_part(results: list[Result], part: str) -> list[Result]:
    """The results of a part; of the comparison, those at the best learning rate."""
    found = [result for result in results if result["part"] == part]
    return best_rates(found) if part == "comparison" else found


def table(part: str, results: list[Result]) -> str:
    return aligned(HEADINGS[part], [("", *COLUMNS), *(_row(result) for result in results)])


def aligned(heading: str, rows: Sequence[Sequence[str]]) -> str:
    """Set cells below each other, the first column to the left and the others to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) if not at else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    ]
    return "\n".join([f"== {heading}", *lines])


def _row(result: Result) -> tuple[str, ...]:
    level = at_level(result)
    level_cell = "never" if not level else _cell(level, 1)
    if level and len(level) < len(result["curves"]["reward"]):
        level_cell += f" ({len(level)} seeds)"
    middle = sorted(last(result, "nearest_beta"))[len(result["curves"]["reward"]) // 2]
    return (
        result["method"]["name"],
        _cell(last(result, "reward"), 3),
        f"{_cell(last(result, 'effective'), 1)} of {result['target']['effective']:.1f}",
        level_cell,
        _cell(last(result, "variation"), 3),
        "-" if result["method"]["kind"] == "grpo" else _cell(last(result, "divergence"), 2),
        _cell(last(result, "nearest"), 3),
        f"{middle:.3g}",
    )


def _cell(values: Sequence[float], digits: int) -> str:
    mean, half = interval(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"
