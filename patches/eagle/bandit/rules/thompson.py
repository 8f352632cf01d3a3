"""Thompson sampling on acceptance and time apart, with the cost of switching.

A step's rate is tokens per row times rows over seconds. How many tokens a row gains depends on the drafter
and hardly on the batch; how long a step takes depends on the batch and hardly on the drafter. So times are learned
per bucket of batch sizes, and the drafter is known by one number for all buckets and arms: its level, the log odds
that a draft is accepted. A step of any arm that drafts tells it, so that a drafter that drifts under one arm is known
under all. It is followed by an extended Kalman filter (a random walk, seen through the tokens that an arm gives at a
level, `acceptance_curves`), and how far an arm is off its curve is learned beside it. Drawing from what a filter believes is
Thompson sampling for a drifting reward as in Russo et al., "A Tutorial on Thompson Sampling" (2018), section 6.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from flashpatch.patches.eagle.bandit.random_tables import LENGTH
from flashpatch.patches.eagle.bandit.rules.acceptance_curves import (
    HIGH,
    LAST,
    LOW,
    PER_UNIT,
    acceptance_curves,
    nearest_point,
    tokens_by_point,
)
from flashpatch.patches.eagle.bandit.rules.base import Rule, Setting
from flashpatch.patches.eagle.bandit.rules.step_times import BORROWED, StepTimes
from flashpatch.patches.eagle.bandit.rules.switching import SwitchCost

UNKNOWN = 4.0
"""Variance of the level before anything is seen, and the largest."""
RENEWED = 1.0
"""Variance of the level of a drafter that has new weights."""
DRIFT = 16.0
"""Variance that the level gains per step, times the window squared."""
CLUMPED = 3.0
"""How much more the tokens of a step vary than those of rows that know nothing of each other, before any is seen."""
MOST_CLUMPED = 40.0
"""The most that one step may say of this."""
RUN = 1.0 / 12.0
"""Share of a new step in the mean that tells a run of surprises from random."""
SURPRISED = 0.8
"""Mean surprise, in standard deviations of one step, at which the drafter must have changed."""
CALM = 0.4
"""Mean surprise below which what an arm is off says something of its shape."""
LEARNED = 1.0 / 50.0
"""Share of a new step in what is learned of spreads."""
SHAPE = 60.0
"""Rows for which an arm's curve is believed."""
SHAPE_SPREAD = 0.003
"""Variance of an arm's tokens over those of its curve, before any is seen."""
TIME_SPREAD = 0.03
"""Relative spread of one step's seconds that is assumed at least, and before any is seen."""
WIDEST = 0.5
"""Relative uncertainty beyond which a draw is not spread further."""
_LEAST = TIME_SPREAD * TIME_SPREAD
_SHAPE_DOUBT = SHAPE * SHAPE_SPREAD


class Thompson(Rule):
    """Draws a level, and for each arm what it is beside its curve, and takes the arm of the highest rate."""

    hold = 4

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        window, count = max(2, setting.window), len(setting.arms)
        self._keep = 1.0 - 1.0 / window
        self._drift = DRIFT / (window * window)
        self._curves, self._by_point = acceptance_curves(setting.arms), tokens_by_point(setting.arms)
        self._drafts = [arm.steps > 0 for arm in setting.arms]
        self._level, self._doubt = 0.0, UNKNOWN
        self._clumped = CLUMPED
        self._surprise = 0.0  # recent mean of what was off, in units of what was expected
        self._shape = [1.0] * count  # an arm's tokens over those of its curve
        self._rows = [SHAPE] * count  # that this was learned from
        self._times: list[StepTimes | None] = [None] * len(setting.buckets)
        self._spread = _LEAST  # of a step's seconds, squared: one slow step must not be believed for long
        self.cost = SwitchCost()

    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        times = self._times[bucket] or self._open(bucket)
        seconds, weights, shape, rows = times.mean, times.weight, self._shape, self._rows
        random = self.setting.random
        normals, at = random.normals, random.at + 1
        if at >= LENGTH:
            at = 0
        here = (self._level - LOW) * PER_UNIT + 0.5
        believed = self._by_point[int(here)]
        place = int(here + PER_UNIT * sqrt(self._doubt) * normals[at])
        drawn = self._by_point[0 if place < 0 else LAST if place > LAST else place]
        grown = times.grown * self._spread
        stay = 1.0
        if current >= 0 and weights[current]:
            stay = self.cost.factor(seconds[current], self.hold)
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
            rate = believed[arm] * per_token
            if rate > best:
                best = rate
            wide = sqrt(grown / weight + _SHAPE_DOUBT / rows[arm])
            rate = drawn[arm] * per_token * (1.0 + (wide if wide < WIDEST else WIDEST) * normals[at])
            if arm != current:
                rate *= stay
            if rate > top:
                top, chosen = rate, arm
        random.at = at
        self.best = best * batch
        return chosen

    def learn(self, bucket: int, batch: int, arm: int, tokens: float, seconds: float, switched: bool) -> None:
        doubt = self._doubt + self._drift
        self._doubt = doubt if doubt < UNKNOWN else UNKNOWN
        if self._drafts[arm]:
            self._learn_level(batch, arm, tokens / batch)
        times = self._times[bucket] or self._open(bucket)
        usual = times.mean[arm]
        if usual and times.weight[arm] >= times.grown:
            # The time of a first step after a switch has the switch in it, which is no property of the arm.
            if switched:
                self.cost.add(seconds - usual)
                seconds = min(seconds, usual)
            else:
                if seconds > 4.0 * usual:
                    seconds = 4.0 * usual
                off = seconds / usual - 1.0
                spread = self._spread + (off * off - self._spread) * LEARNED
                self._spread = spread if spread > _LEAST else _LEAST
            times.add(arm, seconds, 1.0)
        elif usual and seconds > 1.5 * usual:  # a slow step must not condemn an arm of which little is known
            times.add(arm, 1.5 * usual, BORROWED)
        else:
            times.add(arm, seconds, 0.25 if switched else 1.0)

    def _learn_level(self, batch: int, arm: int, gained: float) -> None:
        """A row gained so many tokens, on average."""
        curve, shape, doubt = self._curves[arm], self._shape[arm], self._doubt
        mean, slope, variance = curve[int((self._level - LOW) * PER_UNIT + 0.5)]
        off = gained - mean * shape
        slope *= shape
        known = slope * slope * doubt
        variance /= batch
        clumped = self._clumped
        expected = known + variance * clumped  # square of what it is off by
        surprise = self._surprise + (off / sqrt(expected) - self._surprise) * RUN
        if surprise > SURPRISED or surprise < -SURPRISED:
            doubt += RENEWED
            surprise = 0.0
            known = slope * slope * doubt
            expected = known + variance * clumped
        self._surprise = surprise
        gain = slope * doubt / expected
        seen = (off * off - known) / variance
        clumped += ((seen if seen < MOST_CLUMPED else MOST_CLUMPED) - clumped) * LEARNED
        self._clumped = clumped if clumped > 1.0 else 1.0
        level = self._level + gain * off
        self._level = level = LOW if level < LOW else HIGH if level > HIGH else level
        self._doubt = doubt * (1.0 - gain * slope)
        if -CALM < surprise < CALM:  # else it is the level that is off, and not yet where it belongs
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
        self._doubt = max(self._doubt, RENEWED)
        self._rows = [min(rows, SHAPE) for rows in self._rows]

    def _open(self, bucket: int) -> StepTimes:
        known = [other for other, seen in enumerate(self._times) if seen and any(seen.mean)]
        nearest = min(known, key=lambda other: (abs(other - bucket), other), default=None)
        lender = None if nearest is None else self._times[nearest]
        self._times[bucket] = times = StepTimes(len(self._shape), 1.0 / self._keep, lender)
        return times

    def state(self) -> dict[str, Any]:
        return {
            "level": [self._level, self._doubt, self._clumped, self._surprise],
            "shape": list(self._shape),
            "rows": list(self._rows),
            "times": {str(bucket): seen.state() for bucket, seen in enumerate(self._times) if seen},
            "cost": self.cost.seconds,
            "spread": self._spread,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._level, self._doubt, self._clumped, self._surprise = state["level"]
        self._shape, self._rows = list(state["shape"]), list(state["rows"])
        self.cost.seconds, self._spread = state["cost"], state["spread"]
        self._times = [None] * len(self.setting.buckets)
        for bucket, seen in state["times"].items():
            self._times[int(bucket)] = times = StepTimes(len(self._shape), 1.0 / self._keep)
            times.restore(seen)
