"""What a change of configuration costs, learned from the first step after each."""

from __future__ import annotations


class SwitchCost:
    """Running mean of the seconds that a first step after a switch took more than the arm's steps usually do.

    Attributes:
        seconds: the mean so far.
    """

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, excess: float) -> None:
        """Take in one switch."""
        self.seconds = max(0.0, self.seconds + 0.1 * (excess - self.seconds))

    def factor(self, step_seconds: float, steps: int) -> float:
        """What is left of another arm's rate over ``steps`` steps that begin with a switch, between 0.5 and
        1."""
        spent = steps * step_seconds
        return max(0.5, spent / (spent + self.seconds))
