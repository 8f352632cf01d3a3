"""Choose by Thompson sampling on acceptance and time apart, with the cost of switching.

A step's rate is tokens per request times requests over seconds. How many tokens a request gains depends on the drafter
and hardly on the batch; how long a step takes depends on the batch and hardly on the drafter. So times are learned per
bucket of batch sizes, and the drafter is described by one number for all buckets and arms: its level, the log odds that
a draft is accepted if those before it were. A step of any arm that drafts updates it, so that a change of the drafter
seen under one arm counts for all. The level is estimated by an extended Kalman filter (a random walk, observed through
the tokens that an arm gives at a level, `acceptance_curves`), and each arm's deviation from its curve is learned beside
it. Drawing from the filter's estimate is Thompson sampling for a drifting reward as in Russo et al., "A Tutorial on
Thompson Sampling" (2018), section 6.3."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from math import exp, sqrt

from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.buckets import BUCKETS

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


BORROWED = 0.05
"""Weight, in steps, of a time borrowed from another bucket; its spread is then some 13 %."""


class StepTimes:
    """Keep discounted means.

    Args:
        arms: how many there are.
        keep: share of its weight that a step keeps with each one after it.
        lender: bucket whose means are borrowed.

    Attributes:
        mean: seconds per arm, 0 if the arm never ran.
        weight: steps seen per arm.
        borrowed: means taken from another bucket, until this one has seen a whole step; None then."""

    def __init__(self, arms: int, keep: float, lender: StepTimes | None = None) -> None:
        self.mean = [0.0] * arms if lender is None else list(lender.mean)
        self.weight = [BORROWED if seconds else 0.0 for seconds in self.mean]
        self.keep = keep
        self.borrowed = None if lender is None else list(lender.mean)

    def add(self, arm: int, seconds: float, share: float) -> None:
        """Add a step's seconds with ``share`` of a step's weight."""
        if self.borrowed is not None and share >= 1.0 and self.borrowed[arm]:
            # How arms compare is borrowed; how fast they all are follows from the first whole step of one of them.
            ratio, pairs = seconds / self.borrowed[arm], zip(self.mean, self.borrowed, strict=True)
            self.mean, self.borrowed = [one * ratio if one == lent else one for one, lent in pairs], None
        self.weight = [weight * self.keep for weight in self.weight]
        self.weight[arm] += share
        self.mean[arm] += (seconds - self.mean[arm]) * share / self.weight[arm]


HOLD = 4
"""Steps for which the policy keeps a choice; the first of them verifies the drafts of the one before."""
UNKNOWN = 4.0
"""Variance of the level before anything is seen, and the largest."""
RENEWED = 1.0
"""Variance of the level of a drafter that has new weights."""
DRIFT = 16.0
"""Variance that the level gains per step, times the window squared."""
DISPERSION = 3.0
"""Variance of a step's tokens over that of independent requests, before any is seen."""
MAX_DISPERSION = 40.0
"""Largest dispersion that one step may show."""
SURPRISE_SHARE = 1.0 / 12.0
"""Share of a new step in the mean surprise."""
RENEWAL_SURPRISE = 0.8
"""Mean surprise, in standard deviations of one step, at which the drafter must have changed."""
SHAPE_SURPRISE = 0.4
"""Fit an arm's curve only below this mean surprise."""
SPREAD_SHARE = 1.0 / 50.0
"""Share of a new step in the estimates of dispersion and spread."""
SHAPE_ROWS = 60.0
"""Requests' steps that an arm's curve counts for."""
SHAPE_SPREAD = 0.003
"""Variance of an arm's tokens over those of its curve, before any is seen."""
TIME_SPREAD = 0.03
"""Smallest relative spread of one step's seconds, and the one before any is seen."""
MAX_UNCERTAINTY = 0.5
"""Relative uncertainty beyond which a draw is not spread further."""
_MIN_SPREAD = TIME_SPREAD * TIME_SPREAD
_SHAPE_VARIANCE = SHAPE_ROWS * SHAPE_SPREAD


class Thompson:
    """Draw a level and each arm's deviation from its curve, and choose the arm of the highest rate.

    Args:
        arms: all arms; a choice names them by their place here.
        window: steps, at least 2, after which an observation weighs little or nothing.
        random: the policy's random numbers."""

    def __init__(self, arms: tuple[Arm, ...], window: int, random: random.Random) -> None:
        self._gauss, count = random.gauss, len(arms)
        self._keep = 1.0 - 1.0 / window
        self._drift = DRIFT / (window * window)
        self._curves, self._by_point = acceptance_curves(arms), tokens_by_point(arms)
        self._drafts = [arm.steps > 0 for arm in arms]
        self._level, self._variance = 0.0, UNKNOWN
        self._dispersion = DISPERSION
        self._surprise = 0.0  # recent mean of errors, in standard deviations
        self._shape = [1.0] * count  # an arm's tokens over those of its curve
        self._rows = [SHAPE_ROWS] * count  # requests' steps that this was learned from
        self._times: list[StepTimes | None] = [None] * len(BUCKETS)
        self._spread = _MIN_SPREAD  # of a step's seconds, squared: one slow step must not count for long
        self._cost = 0.0  # mean seconds that a step after a switch takes beyond the arm's usual ones

    def choose(self, bucket: int, allowed: tuple[int, ...], current: int) -> int:
        """Choose one of ``allowed`` (never empty); ``current`` is the engine's present arm, or -1."""
        times, gauss = self._times[bucket] or self._new_times(bucket), self._gauss
        drawn = self._by_point[nearest_point(self._level + sqrt(self._variance) * gauss(0.0, 1.0))]
        switch_factor = 1.0
        if current >= 0 and times.weight[current]:
            spent = HOLD * times.mean[current]
            switch_factor = max(0.5, spent / (spent + self._cost))
        top, chosen = -1.0, allowed[0]
        for arm in allowed:
            weight = times.weight[arm]
            if not weight:  # never run: nothing to draw from
                chosen = arm
                break
            per_token = self._shape[arm] / times.mean[arm]
            uncertainty = sqrt(self._spread / weight + _SHAPE_VARIANCE / self._rows[arm])
            rate = drawn[arm] * per_token * (1.0 + min(uncertainty, MAX_UNCERTAINTY) * gauss(0.0, 1.0))
            if arm != current:
                rate *= switch_factor
            if rate > top:
                top, chosen = rate, arm
        return chosen

    def learn(self, bucket: int, batch: int, arm: int, tokens: float, seconds: float, switched: bool) -> None:
        """Learn from a step; ``switched`` when the step before ran another arm, so that its time includes the switch."""
        self._variance = min(self._variance + self._drift, UNKNOWN)
        if self._drafts[arm]:
            self._learn_level(batch, arm, tokens / batch)
        times = self._times[bucket] or self._new_times(bucket)
        usual = times.mean[arm]
        if usual and times.weight[arm] >= 1.0:
            # The first step after a switch includes the switch, which is not a property of the arm.
            if switched:
                self._cost = max(0.0, self._cost + 0.1 * (seconds - usual - self._cost))
                seconds = min(seconds, usual)
            else:
                seconds = min(seconds, 4.0 * usual)
                error = seconds / usual - 1.0
                spread = self._spread + (error * error - self._spread) * SPREAD_SHARE
                self._spread = max(spread, _MIN_SPREAD)
            times.add(arm, seconds, 1.0)
        elif (
            usual and seconds > 1.5 * usual
        ):  # one slow step must not rule out an arm of which little is known
            times.add(arm, 1.5 * usual, BORROWED)
        else:
            times.add(arm, seconds, 0.25 if switched else 1.0)

    def _learn_level(self, batch: int, arm: int, gained: float) -> None:
        curve, shape, level_variance = self._curves[arm], self._shape[arm], self._variance
        mean, slope, variance = curve[nearest_point(self._level)]
        error = gained - mean * shape
        slope *= shape
        known = slope * slope * level_variance
        variance /= batch
        dispersion = self._dispersion
        expected = known + variance * dispersion  # square of the error
        surprise = self._surprise + (error / sqrt(expected) - self._surprise) * SURPRISE_SHARE
        if abs(surprise) > RENEWAL_SURPRISE:
            level_variance += RENEWED
            surprise = 0.0
            known = slope * slope * level_variance
            expected = known + variance * dispersion
        self._surprise = surprise
        gain = slope * level_variance / expected
        seen = (error * error - known) / variance
        self._dispersion = max(1.0, dispersion + (min(seen, MAX_DISPERSION) - dispersion) * SPREAD_SHARE)
        self._level = level = min(max(self._level + gain * error, LOW), HIGH)
        self._variance = level_variance * (1.0 - gain * slope)
        if abs(surprise) < SHAPE_SURPRISE:  # else the level itself is wrong
            rows = self._rows[arm] = self._rows[arm] * self._keep + batch
            mean = curve[nearest_point(level)][0]
            self._shape[arm] = shape + (gained / mean - shape) * batch / rows

    def rates(self, bucket: int) -> Sequence[float]:
        """Return the estimated tokens per second of each arm in a bucket, 0 if nothing is known."""
        times = self._times[bucket]
        if times is None:
            return [0.0] * len(self._shape)
        rows, tokens = BUCKETS[bucket], self._by_point[nearest_point(self._level)]
        return [
            rows * mean * shape / seconds if seconds else 0.0
            for mean, shape, seconds in zip(tokens, self._shape, times.mean, strict=True)
        ]

    def refresh(self) -> None:
        """Trust less what was seen of the drafter, which has changed."""
        self._variance = max(self._variance, RENEWED)
        self._rows = [min(rows, SHAPE_ROWS) for rows in self._rows]

    def _new_times(self, bucket: int) -> StepTimes:
        known = [other for other, seen in enumerate(self._times) if seen and any(seen.mean)]
        nearest = min(known, key=lambda other: (abs(other - bucket), other), default=None)
        lender = None if nearest is None else self._times[nearest]
        self._times[bucket] = times = StepTimes(len(self._shape), self._keep, lender)
        return times
