"""A task with many right answers: write a number as a sum or a difference of two numbers from 1 to 99.

Each question has 98 right answers, such as ``5+19`` and ``80-56`` to 24, written without spaces.
"""

from __future__ import annotations

import random
import re

FORM = re.compile(r"([1-9][0-9]?)([+-])([1-9][0-9]?)")
LONGEST = 6
"""Tokens of an answer: five characters and the end."""


def value(expression: str) -> int | None:
    """What a sum or difference gives; None for a text of another form."""
    found = FORM.fullmatch(expression)
    if found is None:
        return None
    one, other = int(found[1]), int(found[3])
    return one + other if found[2] == "+" else one - other


TARGETS = tuple(range(10, 42))
"""Numbers of two digits, so that all questions have equally many tokens."""
HELD_OUT = TARGETS[2::4]
"""Targets that reinforcement learning never asks for."""
TRAINED = tuple(target for target in TARGETS if target not in HELD_OUT)
RIGHT = {
    target: [
        *(f"{one}+{target - one}" for one in range(1, target)),
        *(f"{one}-{one - target}" for one in range(target + 1, 100)),
    ]
    for target in TARGETS
}
"""The right answers to each target."""


def question(target: int) -> str:
    """The text that an answer continues."""
    return f"{target} ="


def some_right(target: int, count: int, draw: random.Random) -> list[str]:
    """Right answers, each as likely as any other."""
    return draw.choices(RIGHT[target], k=count)
