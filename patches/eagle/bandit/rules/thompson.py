"""Choose by Thompson sampling on acceptance and time apart, with the cost of switching.

A step's rate is tokens per request times requests over seconds. How many tokens a request gains depends on
the drafter and hardly on the batch; how long a step takes depends on the batch and hardly on the drafter. So
times are
learned per bucket of batch sizes, and the drafter is described by one number for all buckets and arms: its
level, the log odds that a draft is accepted if those before it were. A step of any arm that drafts updates
it, so that a change of the drafter seen under one arm counts for all. The level is estimated by an extended
Kalman filter (a random walk, observed through the tokens that an arm gives at a level, `acceptance_curves`),
and each arm's deviation from its curve is learned beside it. Drawing from the filter's estimate is Thompson
sampling for a drifting reward as in Russo et al., "A Tutorial on Thompson Sampling" (2018), section 6.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from flashpatch.patches.eagle.bandit.rules.acceptance_curves import (
    HIGH,
    LAST,
    LOW,
    PER_UNIT,
    acceptance_curves,
    nearest_point,
    tokens_by_point,
)
from flashpatch.patches.eagle.bandit.rules.base import LENGTH, Rule, Setting
from flashpatch.patches.eagle.bandit.rules.step_times import BORROWED, MAX_WEIGHT, StepTimes, SwitchCost

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


class Thompson(Rule):
    """Draw a level and each arm's deviation from its curve, and choose the arm of the highest rate."""

    hold = 4

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        window, count = max(2, setting.window), len(setting.arms)
        self._keep = 1.0 - 1.0 / window
        self._drift = DRIFT / (window * window)
        self._curves, self._by_point = acceptance_curves(setting.arms), tokens_by_point(setting.arms)
        self._drafts = [arm.steps > 0 for arm in setting.arms]
        self._level, self._variance = 0.0, UNKNOWN
        self._dispersion = DISPERSION
        self._surprise = 0.0  # recent mean of errors, in standard deviations
        self._shape = [1.0] * count  # an arm's tokens over those of its curve
        self._rows = [SHAPE_ROWS] * count  # requests' steps that this was learned from
        self._times: list[StepTimes | None] = [None] * len(setting.buckets)
        self._spread = _MIN_SPREAD  # of a step's seconds, squared: one slow step must not count for long
        self.cost = SwitchCost()

    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        times = self._times[bucket] or self._new_times(bucket)
        seconds, weights, shape, rows = times.mean, times.weight, self._shape, self._rows
        random = self.setting.random
        normals, at = random.normals, random.position + 1
        if at >= LENGTH:
            at = 0
        here = (self._level - LOW) * PER_UNIT + 0.5
        expected = self._by_point[int(here)]
        place = int(here + PER_UNIT * sqrt(self._variance) * normals[at])
        drawn = self._by_point[0 if place < 0 else LAST if place > LAST else place]
        spread = times.newest * self._spread
        switch_factor = 1.0
        if current >= 0 and weights[current]:
            switch_factor = self.cost.factor(seconds[current], self.hold)
        top, chosen, best = -1.0, allowed[0], 0.0
        for arm in allowed:
            weight = weights[arm]
            if not weight:  # never run: nothing to draw from
                chosen = arm
                break
            at += 1
            if at >= LENGTH:
                at = 0
            per_token = shape[arm] / seconds[arm]
            rate = expected[arm] * per_token
            if rate > best:
                best = rate
            uncertainty = sqrt(spread / weight + _SHAPE_VARIANCE / rows[arm])
            if uncertainty > MAX_UNCERTAINTY:
                uncertainty = MAX_UNCERTAINTY
            rate = drawn[arm] * per_token * (1.0 + uncertainty * normals[at])
            if arm != current:
                rate *= switch_factor
            if rate > top:
                top, chosen = rate, arm
        random.position = at
        self.best = best * batch
        return chosen

    def learn(self, bucket: int, batch: int, arm: int, tokens: float, seconds: float, switched: bool) -> None:
        level_variance = self._variance + self._drift
        self._variance = level_variance if level_variance < UNKNOWN else UNKNOWN
        if self._drafts[arm]:
            self._learn_level(batch, arm, tokens / batch)
        times = self._times[bucket] or self._new_times(bucket)
        usual, newest = times.mean[arm], times.newest
        if usual and times.weight[arm] >= newest:
            # The first step after a switch includes the switch, which is not a property of the arm.
            if switched:
                self.cost.add(seconds - usual)
                if seconds > usual:
                    seconds = usual
            else:
                if seconds > 4.0 * usual:
                    seconds = 4.0 * usual
                error = seconds / usual - 1.0
                spread = self._spread + (error * error - self._spread) * SPREAD_SHARE
                self._spread = spread if spread > _MIN_SPREAD else _MIN_SPREAD
                newest *= times.growth
                if (
                    times.borrowed is None and newest <= MAX_WEIGHT
                ):  # most steps: `StepTimes.add` without the call
                    times.newest = newest
                    times.weight[arm] = weight = times.weight[arm] + newest
                    times.mean[arm] = usual + (seconds - usual) * newest / weight
                    return
            times.add(arm, seconds, 1.0)
        elif (
            usual and seconds > 1.5 * usual
        ):  # one slow step must not rule out an arm of which little is known
            times.add(arm, 1.5 * usual, BORROWED)
        else:
            times.add(arm, seconds, 0.25 if switched else 1.0)

    def _learn_level(self, batch: int, arm: int, gained: float) -> None:
        curve, shape, level_variance = self._curves[arm], self._shape[arm], self._variance
        mean, slope, variance = curve[int((self._level - LOW) * PER_UNIT + 0.5)]
        error = gained - mean * shape
        slope *= shape
        known = slope * slope * level_variance
        variance /= batch
        dispersion = self._dispersion
        expected = known + variance * dispersion  # square of the error
        surprise = self._surprise + (error / sqrt(expected) - self._surprise) * SURPRISE_SHARE
        if surprise > RENEWAL_SURPRISE or surprise < -RENEWAL_SURPRISE:
            level_variance += RENEWED
            surprise = 0.0
            known = slope * slope * level_variance
            expected = known + variance * dispersion
        self._surprise = surprise
        gain = slope * level_variance / expected
        seen = (error * error - known) / variance
        dispersion += ((seen if seen < MAX_DISPERSION else MAX_DISPERSION) - dispersion) * SPREAD_SHARE
        self._dispersion = dispersion if dispersion > 1.0 else 1.0
        level = self._level + gain * error
        self._level = level = LOW if level < LOW else HIGH if level > HIGH else level
        self._variance = level_variance * (1.0 - gain * slope)
        if -SHAPE_SURPRISE < surprise < SHAPE_SURPRISE:  # else the level itself is wrong
            rows = self._rows[arm] = self._rows[arm] * self._keep + batch
            mean = curve[int((level - LOW) * PER_UNIT + 0.5)][0]
            self._shape[arm] = shape + (gained / mean - shape) * batch / rows

    def rates(self, bucket: int) -> Sequence[float]:
        times = self._times[bucket]
        if times is None:
            return [0.0] * len(self._shape)
        rows, tokens = self.setting.buckets.edges[bucket], self._by_point[nearest_point(self._level)]
        return [
            rows * mean * shape / seconds if seconds else 0.0
            for mean, shape, seconds in zip(tokens, self._shape, times.mean, strict=True)
        ]

    def refresh(self) -> None:
        self._variance = max(self._variance, RENEWED)
        self._rows = [min(rows, SHAPE_ROWS) for rows in self._rows]

    def _new_times(self, bucket: int) -> StepTimes:
        known = [other for other, seen in enumerate(self._times) if seen and any(seen.mean)]
        nearest = min(known, key=lambda other: (abs(other - bucket), other), default=None)
        lender = None if nearest is None else self._times[nearest]
        self._times[bucket] = times = StepTimes(len(self._shape), 1.0 / self._keep, lender)
        return times

    def state(self) -> dict[str, Any]:
        return {
            "level": [self._level, self._variance, self._dispersion, self._surprise],
            "shape": list(self._shape),
            "rows": list(self._rows),
            "times": {str(bucket): seen.state() for bucket, seen in enumerate(self._times) if seen},
            "cost": self.cost.seconds,
            "spread": self._spread,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._level, self._variance, self._dispersion, self._surprise = state["level"]
        self._shape, self._rows = list(state["shape"]), list(state["rows"])
        self.cost.seconds, self._spread = state["cost"], state["spread"]
        self._times = [None] * len(self.setting.buckets)
        for bucket, seen in state["times"].items():
            self._times[int(bucket)] = times = StepTimes(len(self._shape), 1.0 / self._keep)
            times.restore(seen)
