"""The reward of the expressions: 1 if it is one and gives the number, else 0."""

from __future__ import annotations

import re
from typing import Any

FORM = re.compile(r"(\d)([+\-*])(\d)")


def value(expression: str) -> int | None:
    """What ``a+b``, ``a-b`` or ``a*b`` of two digits gives; None for anything else."""
    found = FORM.fullmatch(expression)
    if found is None:
        return None
    a, sign, b = int(found[1]), found[2], int(found[3])
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


ALL = [f"{a}{sign}{b}" for sign in "+-*" for a in range(10) for b in range(10)]
TARGETS = tuple(range(2, 10))
"""What the task asks for."""
RIGHT = {target: [text for text in ALL if value(text) == target] for target in range(10)}
"""The right expressions of each target."""


def plain(answer: str) -> str:
    """An answer without the chat's end."""
    return answer.replace("<|end|>", "").strip()


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """verl's custom reward function."""
    return float(value(plain(solution_str)) == int(ground_truth))
