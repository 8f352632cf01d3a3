"""Whether new drafter weights stay: acceptance before and after they came."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Literal

from flashpatch.errors import PatchError

Verdict = Literal["wait", "keep", "roll back"]


@dataclass(frozen=True)
class Acceptance:
    """Acceptance length over some steps: how many, mean tokens per row, and standard error of the mean."""

    steps: int
    mean: float
    error: float


class Judge:
    """Compares acceptance around a change of weights.

    Args:
        share: share of the acceptance length that a change may cost before it goes back; 1 lets any stay.
        steps: steps compared on each side.
        sure: standard errors by which the loss must exceed chance.

    Attributes:
        before, after: what was compared last.
    """

    def __init__(self, share: float = 0.2, steps: int = 64, sure: float = 2.0) -> None:
        if not 0.0 <= share <= 1.0 or steps < 2 or not sure >= 0.0:
            raise PatchError(
                f"a rollback at a share of {share} over {steps} steps makes no sense.",
                patch="eagle",
                target="rollback",
                advice="Give a share from 0 to 1 and at least 2 steps.",
            )
        self.share, self.steps, self.sure = share, steps, sure
        self.before = self.after = Acceptance(0, 0.0, 0.0)
        self.waiting = False
        self.ignored = 0
        self._recent: deque[float] = deque(maxlen=steps)

    def saw(self, tokens: float, rows: int) -> None:
        """Take in a speculative step: tokens it gave over the rows that drafted."""
        length = tokens / rows if rows > 0 else 0.0
        if length > 0.0 and isfinite(length):
            self._recent.append(length)
        else:
            self.ignored += 1

    def changed(self) -> None:
        """New weights are in: what was seen so far is before, what comes is after."""
        if not self.waiting or len(self._recent) >= self.steps:
            # Weights that were never judged are no measure; then the older one stands.
            self.before = _acceptance(self._recent)
        self.waiting = True
        self._recent.clear()

    def verdict(self) -> Verdict:
        """``wait`` until enough steps came; then, once, ``keep`` or ``roll back``; ``keep`` without a
        change."""
        if not self.waiting:
            return "keep"
        if len(self._recent) < self.steps:
            return "wait"
        self.waiting = False
        self.after = _acceptance(self._recent)
        lost = self.before.mean - self.after.mean
        chance = self.sure * sqrt(self.before.error**2 + self.after.error**2)
        enough = self.before.steps >= max(2, self.steps // 4)
        worse = enough and self.share < 1.0 and lost > self.share * self.before.mean and lost > chance
        return "roll back" if worse else "keep"

    def rolled_back(self) -> None:
        """The older weights are in again: what is measured from now on is theirs."""
        self.waiting = False
        self._recent.clear()


def _acceptance(lengths: deque[float]) -> Acceptance:
    count = len(lengths)
    if count < 2:
        return Acceptance(count, lengths[0] if lengths else 0.0, 0.0)
    mean = sum(lengths) / count
    spread = sum((length - mean) ** 2 for length in lengths) / (count - 1)
    return Acceptance(count, mean, sqrt(spread / count))
