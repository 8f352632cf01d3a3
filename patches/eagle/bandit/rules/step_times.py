"""Estimate the seconds of a step per arm in one bucket of batch sizes, and what a change of arm costs."""

from __future__ import annotations

MAX_WEIGHT = 1e60
"""New observations get growing weights, instead of old ones shrinking ones; at this weight all are scaled
back."""
BORROWED = 0.05
"""Weight, in steps, of a time borrowed from another bucket; its spread is then some 13 %."""


class StepTimes:
    """Keep discounted means.

    Attributes:
        mean: seconds per arm, 0 if the arm never ran.
        weight: steps seen per arm, in units of `newest`.
        newest: weight of the newest step.
        borrowed: means taken from another bucket, until this one has seen a whole step; None then.
    """

    __slots__ = ("newest", "growth", "borrowed", "mean", "weight")

    def __init__(self, arms: int, growth: float, lender: StepTimes | None = None) -> None:
        self.mean = [0.0] * arms if lender is None else list(lender.mean)
        self.weight = [BORROWED if seconds else 0.0 for seconds in self.mean]
        self.newest = 1.0
        self.growth = growth
        self.borrowed = None if lender is None else list(lender.mean)

    def add(self, arm: int, seconds: float, share: float) -> None:
        """Add a step's seconds with ``share`` of a step's weight."""
        if self.borrowed is not None and share >= 1.0 and self.borrowed[arm]:
            # How arms compare is borrowed; how fast they all are follows from the first whole step of one of them.
            ratio, self.borrowed = seconds / self.borrowed[arm], None
            for other, weight in enumerate(self.weight):
                if weight == BORROWED:
                    self.mean[other] *= ratio
        self.newest *= self.growth
        share *= self.newest
        self.weight[arm] += share
        self.mean[arm] += (seconds - self.mean[arm]) * share / self.weight[arm]
        if self.newest > MAX_WEIGHT:
            self.weight = [weight / self.newest for weight in self.weight]
            self.newest = 1.0

    def state(self) -> list[object]:
        """Return all of it, fit for JSON."""
        return [
            list(self.mean),
            list(self.weight),
            self.newest,
            None if self.borrowed is None else list(self.borrowed),
        ]

    def restore(self, state: list) -> None:
        """Restore a `state`."""
        mean, weight, self.newest, borrowed = state
        self.mean, self.weight = list(mean), list(weight)
        self.borrowed = None if borrowed is None else list(borrowed)


class SwitchCost:
    """Average the extra seconds of the first step after a switch over the arm's usual step.

    Attributes:
        seconds: the mean so far.
    """

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, excess: float) -> None:
        """Add one switch."""
        self.seconds = max(0.0, self.seconds + 0.1 * (excess - self.seconds))

    def factor(self, step_seconds: float, steps: int) -> float:
        """Return the share, 0.5 to 1, of another arm's rate that is left over ``steps`` steps that begin with
        a switch."""
        spent = steps * step_seconds
        return max(0.5, spent / (spent + self.seconds))
