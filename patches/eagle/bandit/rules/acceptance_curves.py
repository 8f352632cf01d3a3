"""Tokens that a row gains under each arm, by one number that says how good the drafter is.

The number is the *level*: the log odds that a draft is accepted where those before it were. It is kept on a grid,
so that what follows from it is looked up.
"""

from __future__ import annotations

import functools
from math import exp

from flashpatch.patches.eagle.bandit.arm import Arm

LOW, HIGH = -5.0, 5.0
"""Ends of the grid: chances of 0.7 % and 99.3 %."""
PER_UNIT = 20
"""Points of the grid per unit of log odds."""
LAST = int((HIGH - LOW) * PER_UNIT)
_ROUGH = 0.01
"""Variance of a row's tokens that is assumed at least: no drafter is as even as the model of it."""

Point = tuple[float, float, float]


def nearest_point(level: float) -> int:
    """The grid point nearest to a level."""
    at = int((level - LOW) * PER_UNIT + 0.5)
    return 0 if at < 0 else LAST if at > LAST else at


@functools.lru_cache(maxsize=16)
def acceptance_curves(arms: tuple[Arm, ...]) -> tuple[tuple[Point, ...], ...]:
    """For each arm, and each point of the grid: a row's expected tokens (the target's own included), their
    derivative by the level, and their variance."""
    return tuple(tuple(_point(arm, LOW + at / PER_UNIT) for at in range(LAST + 1)) for arm in arms)


@functools.lru_cache(maxsize=16)
def tokens_by_point(arms: tuple[Arm, ...]) -> tuple[tuple[float, ...], ...]:
    """For each point of the grid: a row's expected tokens under each arm."""
    return tuple(zip(*([mean for mean, _, _ in curve] for curve in acceptance_curves(arms)), strict=True))


def _point(arm: Arm, level: float) -> Point:
    """At each depth of a tree a row goes on if one of the ``topk`` branches is accepted, as if each was with the same
    chance; how far this is off for an engine's trees is learned."""
    if not arm.steps:
        return 1.0, 0.0, 0.0
    chance = 1.0 / (1.0 + exp(-level))
    on = 1.0 - (1.0 - chance) ** arm.topk
    mean = sum(on**depth for depth in range(arm.steps + 1))
    squares = sum((2 * depth + 1) * on**depth for depth in range(arm.steps + 1))
    slope = sum(depth * on ** (depth - 1) for depth in range(1, arm.steps + 1))
    slope *= arm.topk * (1.0 - chance) ** (arm.topk - 1) * chance * (1.0 - chance)
    return mean, slope, squares - mean * mean + _ROUGH
