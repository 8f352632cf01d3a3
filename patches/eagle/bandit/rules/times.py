"""Seconds of a step per arm in one group of batch sizes."""

from __future__ import annotations

LARGE = 1e60
"""New observations weigh ever more instead of old ones ever less; at this weight all are scaled back."""
BORROWED = 0.05
"""Weight in steps of a time that another group lent; its spread is then some 13 %."""


class Times:
    """Discounted means.

    Attributes:
        mean: seconds per arm, 0 where the arm never ran.
        weight: steps seen per arm, in units of `grown`.
        grown: weight of the newest step.
        lent: means came from another group, and nothing was seen in this one.
    """

    __slots__ = ("grown", "growth", "lent", "mean", "weight")

    def __init__(self, arms: int, growth: float, lender: Times | None = None) -> None:
        self.mean = [0.0] * arms if lender is None else list(lender.mean)
        self.weight = [BORROWED if seconds else 0.0 for seconds in self.mean]
        self.grown = 1.0
        self.growth = growth
        self.lent = lender is not None

    def add(self, arm: int, seconds: float, share: float) -> None:
        """Take in a step's seconds with ``share`` of a step's weight."""
        if self.lent:  # how arms compare was lent; how fast they all are is seen with the first of them
            self.lent = False
            if self.mean[arm]:
                ratio = seconds / self.mean[arm]
                self.mean = [usual * ratio for usual in self.mean]
        self.grown *= self.growth
        share *= self.grown
        self.weight[arm] += share
        self.mean[arm] += (seconds - self.mean[arm]) * share / self.weight[arm]
        if self.grown > LARGE:
            self.weight = [weight / self.grown for weight in self.weight]
            self.grown = 1.0

    def state(self) -> list[object]:
        """All of it, fit for JSON."""
        return [list(self.mean), list(self.weight), self.grown, self.lent]

    def restore(self, state: list) -> None:
        """Take up a `state`."""
        mean, weight, self.grown, self.lent = state
        self.mean, self.weight = list(mean), list(weight)
