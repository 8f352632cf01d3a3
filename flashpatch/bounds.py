"""Check a number against the bounds of an option. Imports nothing: a process needs it at its start."""

from __future__ import annotations


class Bounded:
    """Give an option with ``least``, ``most``, ``above`` and ``below`` its range."""

    __slots__ = ()

    least: float | None
    most: float | None
    above: float | None
    below: float | None

    @property
    def range(self) -> str:
        """The bounds in words, such as ``"at least 0 and below 1"``; empty without any."""
        bounds = (
            ("at least", self.least),
            ("above", self.above),
            ("at most", self.most),
            ("below", self.below),
        )
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)

    def in_range(self, value: float) -> bool:
        """Whether a number is within the bounds, if there are any; one that is not finite never is."""
        if not self.range:
            return True
        return (
            value - value == 0  # neither infinite nor NaN
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )
