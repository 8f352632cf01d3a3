"""Estimate the seconds of a step per arm in one bucket of batch sizes."""

from __future__ import annotations

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
        borrowed: means taken from another bucket, until this one has seen a whole step; None then.
    """

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

    def state(self) -> list[object]:
        """Return all of it, fit for JSON."""
        return [list(self.mean), list(self.weight), None if self.borrowed is None else list(self.borrowed)]

    def restore(self, state: list) -> None:
        """Restore a `state`."""
        mean, weight, borrowed = state
        self.mean, self.weight = list(mean), list(weight)
        self.borrowed = None if borrowed is None else list(borrowed)
