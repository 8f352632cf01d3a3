"""Discounted Thompson sampling on acceptance and time apart, with the cost of switching.

A step's rate is tokens per row times rows over seconds. How many tokens a row gains depends on the drafter
and hardly on the batch; how long a step takes depends on the batch and hardly on the drafter. So the first is
learned once for all groups and forgets, and the second is learned per group. A drafter that drifts in one
group is then known in all, and a group met for the first time has little to learn. Discounting follows Raj
and Kalyani, "Taming Non-stationary Bandits: A Bayesian Approach" (2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from flashpatch.patches.eagle.bandit.noise import LENGTH
from flashpatch.patches.eagle.bandit.rules.base import Rule, Setting
from flashpatch.patches.eagle.bandit.rules.switching import SwitchCost

LARGE = 1e60
"""New observations weigh ever more instead of old ones ever less; at this weight all are scaled back."""
TIME_SPREAD = 0.03
"""Relative spread of one step's seconds that is assumed at least, and before any is seen."""
SPREAD_STEPS = 50.0
"""Steps over which the spread of seconds is learned."""
BORROWED = 0.05
"""Weight in steps of a time that another group lent; its spread is then some 13 %."""
FEW = 4.0
"""Rows that what was seen counts for after `refresh`."""
_LEAST = TIME_SPREAD * TIME_SPREAD
WIDEST = 0.5
"""Relative uncertainty beyond which a draw is not spread further."""


class Thompson(Rule):
    """Draws a rate for each arm from what is believed of it and takes the arm of the highest draw.

    The state of a group is the seconds of a step per arm; the state of the rule is the tokens per row of each
    arm, with the spread seen, and how much the seconds of one arm spread: on a machine that others use too, one
    slow measurement must not be believed for long. Both forget exponentially over ``window`` steps.
    """

    hold = 2

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        arms = setting.arms
        count = len(arms)
        self._growth = 1.0 / (1.0 - 1.0 / max(2, setting.window))
        self._weight = 1.0
        self._rows = [0.0] * count
        self._tokens = [0.0] * count
        self._pulls = [0.0] * count
        self._squares = [0.0] * count
        self._mean = [0.0] * count  # tokens per row
        self._doubt = [0.0] * count  # variance of the mean over its square, per unit of weight
        self._guess = [0.1 + 0.1 * arm.steps * arm.steps for arm in arms]  # variance before any is seen
        self._times: list[_Times | None] = [None] * len(setting.groups)
        self._spread = _LEAST  # of a step's seconds, squared
        self.cost = SwitchCost()

    def choose(self, group: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        mean = self._mean
        times = self._times[group] or self._open(group)
        seconds, weights = times.mean, times.weight
        noise = self.setting.noise
        normals, at = noise.normals, noise.at
        doubt, weight, grown = self._doubt, self._weight, times.grown * self._spread
        stay = 1.0
        if current >= 0 and weights[current]:
            stay = self.cost.factor(seconds[current], self.hold)
        top, chosen, best = -1.0, allowed[0], 0.0
        for arm in allowed:
            if not mean[arm] or not weights[arm]:  # never run: nothing to draw from
                chosen = arm
                break
            at += 1
            if at >= LENGTH:
                at = 0
            wide = sqrt(doubt[arm] * weight + grown / weights[arm])
            draw = mean[arm] / seconds[arm]
            if draw > best:
                best = draw
            draw *= 1.0 + (wide if wide < WIDEST else WIDEST) * normals[at]
            if arm != current:
                draw *= stay
            if draw > top:
                top, chosen = draw, arm
        noise.at = at
        self.best = best * batch
        return chosen

    def learn(self, group: int, batch: int, arm: int, tokens: float, seconds: float, switched: bool) -> None:
        weight = self._weight = self._weight * self._growth
        rows = self._rows[arm] = self._rows[arm] + weight * batch
        total = self._tokens[arm] = self._tokens[arm] + weight * tokens
        pulls = self._pulls[arm] = self._pulls[arm] + weight
        mean = self._mean[arm] = total / rows
        off = tokens / batch - mean
        squares = self._squares[arm] = self._squares[arm] + weight * batch * off * off
        # Two steps' worth of the guess keep a few equal observations from looking certain.
        spread = (squares + 2.0 * weight * self._guess[arm]) / (pulls + 2.0 * weight)
        self._doubt[arm] = spread / (rows * mean * mean)
        times = self._times[group] or self._open(group)
        usual = times.mean[arm]
        if usual and times.weight[arm] >= times.grown:
            # The time of a first step after a switch has the switch in it, which is no property of the arm.
            if switched:
                self.cost.saw(seconds - usual)
                seconds = min(seconds, usual)
            else:
                if seconds > 4.0 * usual:
                    seconds = 4.0 * usual
                off = seconds / usual - 1.0
                spread = self._spread + (off * off - self._spread) / SPREAD_STEPS
                self._spread = spread if spread > _LEAST else _LEAST
            times.add(arm, seconds, 1.0)
        elif usual and seconds > 1.5 * usual:  # a slow step must not condemn an arm of which little is known
            times.add(arm, 1.5 * usual, BORROWED)
        else:
            times.add(arm, seconds, 0.25 if switched else 1.0)
        if weight > LARGE:
            self._scale_back()

    def rates(self, group: int) -> Sequence[float]:
        times = self._times[group]
        rows = self.setting.groups.edges[group]
        if times is None:
            return [0.0] * len(self._mean)
        return [
            rows * mean / seconds if seconds else 0.0
            for mean, seconds in zip(self._mean, times.mean, strict=True)
        ]

    def refresh(self) -> None:
        for arm, kind in enumerate(self.setting.arms):
            if kind.steps and self._rows[arm]:
                keep = min(1.0, FEW * self._weight / self._rows[arm])
                for sums in (self._rows, self._tokens, self._pulls, self._squares):
                    sums[arm] *= keep
                self._doubt[arm] = self._guess[arm] / (self._rows[arm] * self._mean[arm] ** 2)

    def _open(self, group: int) -> _Times:
        self._times[group] = times = _Times(len(self._mean), self._growth)
        known = [other for other, seen in enumerate(self._times) if seen and any(seen.mean)]
        if known:
            nearest = self._times[min(known, key=lambda other: (abs(other - group), other))]
            for arm, seconds in enumerate(nearest.mean):
                if seconds:
                    times.mean[arm], times.weight[arm] = seconds, BORROWED
        return times

    def _scale_back(self) -> None:
        down = 1.0 / self._weight
        for sums in (self._rows, self._tokens, self._pulls, self._squares):
            sums[:] = [value * down for value in sums]
        self._doubt[:] = [value * self._weight for value in self._doubt]
        self._weight = 1.0

    def state(self) -> dict[str, Any]:
        lists = ("_rows", "_tokens", "_pulls", "_squares", "_mean", "_doubt")
        times = {
            str(group): [*map(list, (seen.mean, seen.weight)), seen.grown] for group, seen in self._met()
        }
        return {
            **{name: list(getattr(self, name)) for name in lists},
            "weight": self._weight,
            "times": times,
            "cost": self.cost.seconds,
            "spread": self._spread,
        }

    def restore(self, state: dict[str, Any]) -> None:
        for name in ("_rows", "_tokens", "_pulls", "_squares", "_mean", "_doubt"):
            setattr(self, name, list(state[name]))
        self._weight, self.cost.seconds, self._spread = state["weight"], state["cost"], state["spread"]
        self._times = [None] * len(self.setting.groups)
        for group, (mean, weight, grown) in state["times"].items():
            self._times[int(group)] = times = _Times(len(self._mean), self._growth)
            times.mean, times.weight, times.grown = list(mean), list(weight), grown

    def _met(self) -> list[tuple[int, _Times]]:
        return [(group, seen) for group, seen in enumerate(self._times) if seen]


class _Times:
    """Seconds of a step per arm in one group: discounted means, with weights that grow as above."""

    __slots__ = ("grown", "growth", "mean", "weight")

    def __init__(self, arms: int, growth: float) -> None:
        self.mean = [0.0] * arms
        self.weight = [0.0] * arms
        self.grown = 1.0
        self.growth = growth

    def add(self, arm: int, seconds: float, share: float) -> None:
        self.grown *= self.growth
        share *= self.grown
        self.weight[arm] += share
        self.mean[arm] += (seconds - self.mean[arm]) * share / self.weight[arm]
        if self.grown > LARGE:
            self.weight = [weight / self.grown for weight in self.weight]
            self.grown = 1.0
