"""Learn what a change of configuration costs, from the first step after each."""

from __future__ import annotations


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
