"""Compute the tokens that a request gains under each arm from one number, the drafter's level.

The *level* is the log odds that a draft is accepted if those before it were. It is kept on a grid, so that
tokens are looked up, not computed.
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
_MIN_VARIANCE = 0.01
"""Added to the variance of a request's tokens: no drafter is as regular as this model of it."""

Point = tuple[float, float, float]


def nearest_point(level: float) -> int:
    """Return the grid point nearest to a level."""
    at = int((level - LOW) * PER_UNIT + 0.5)
    return 0 if at < 0 else LAST if at > LAST else at


@functools.lru_cache(maxsize=16)
def acceptance_curves(arms: tuple[Arm, ...]) -> tuple[tuple[Point, ...], ...]:
    """Return for each arm and grid point a request's expected tokens (the target's own included), their
    derivative by the level, and their variance."""
    return tuple(tuple(_point(arm, LOW + at / PER_UNIT) for at in range(LAST + 1)) for arm in arms)


@functools.lru_cache(maxsize=16)
def tokens_by_point(arms: tuple[Arm, ...]) -> tuple[tuple[float, ...], ...]:
    """Return for each grid point a request's expected tokens under each arm."""
    return tuple(zip(*([mean for mean, _, _ in curve] for curve in acceptance_curves(arms)), strict=True))


def _point(arm: Arm, level: float) -> Point:
    """Compute one point: at each depth of a tree one of ``topk`` branches may be accepted, each with the same
    chance. How much an engine's trees differ from that is learned."""
    if not arm.steps:
        return 1.0, 0.0, 0.0
    chance = 1.0 / (1.0 + exp(-level))
    on = 1.0 - (1.0 - chance) ** arm.topk
    mean = sum(on**depth for depth in range(arm.steps + 1))
    squares = sum((2 * depth + 1) * on**depth for depth in range(arm.steps + 1))
    slope = sum(depth * on ** (depth - 1) for depth in range(1, arm.steps + 1))
    slope *= arm.topk * (1.0 - chance) ** (arm.topk - 1) * chance * (1.0 - chance)
    return mean, slope, squares - mean * mean + _MIN_VARIANCE
