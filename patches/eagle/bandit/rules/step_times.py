"""Seconds of a step per arm in one bucket of batch sizes."""

from __future__ import annotations

LARGE = 1e60
"""New observations weigh ever more instead of old ones ever less; at this weight all are scaled back."""
BORROWED = 0.05
"""Weight in steps of a time that another bucket lent; its spread is then some 13 %."""


class StepTimes:
    """Discounted means.

    Attributes:
        mean: seconds per arm, 0 where the arm never ran.
        weight: steps seen per arm, in units of `grown`.
        grown: weight of the newest step.
        lent: means that came from another bucket, until a whole step was seen in this one; None then.
    """

    __slots__ = ("grown", "growth", "lent", "mean", "weight")

    def __init__(self, arms: int, growth: float, lender: StepTimes | None = None) -> None:
        self.mean = [0.0] * arms if lender is None else list(lender.mean)
        self.weight = [BORROWED if seconds else 0.0 for seconds in self.mean]
        self.grown = 1.0
        self.growth = growth
        self.lent = None if lender is None else list(lender.mean)

    def add(self, arm: int, seconds: float, share: float) -> None:
        """Take in a step's seconds with ``share`` of a step's weight."""
        if self.lent is not None and share >= 1.0 and self.lent[arm]:
            # How arms compare was lent; how fast they all are is seen with the first of them that is to be believed.
            ratio, self.lent = seconds / self.lent[arm], None
            for other, weight in enumerate(self.weight):
                if weight == BORROWED:
                    self.mean[other] *= ratio
        self.grown *= self.growth
        share *= self.grown
        self.weight[arm] += share
        self.mean[arm] += (seconds - self.mean[arm]) * share / self.weight[arm]
        if self.grown > LARGE:
            self.weight = [weight / self.grown for weight in self.weight]
            self.grown = 1.0

    def state(self) -> list[object]:
        """All of it, fit for JSON."""
        return [
            list(self.mean),
            list(self.weight),
            self.grown,
            None if self.lent is None else list(self.lent),
        ]

    def restore(self, state: list) -> None:
        """Take up a `state`."""
        mean, weight, self.grown, lent = state
        self.mean, self.weight = list(mean), list(weight)
        self.lent = None if lent is None else list(lent)
