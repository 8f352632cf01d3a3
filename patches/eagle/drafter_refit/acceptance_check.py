"""Whether new drafter weights are better than those before, judged by what the target accepts.

Acceptance is compared as the chance that a draft is accepted, given that those before it were, which does not
depend on how many tokens the bandit happened to ask for; and as the acceptance length that this chance gives at
the engine's number of tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass
class Tally:
    """Drafts tried and accepted. A draft behind a rejected one was not tried."""

    tried: int = 0
    accepted: int = 0

    def length(self, most: int) -> float:
        """Expected tokens of a step with ``most`` drafts, the target's own token included; 0 if none was tried."""
        if not self.tried:
            return 0.0
        chance = self.accepted / self.tried
        return sum(chance**k for k in range(most + 1))


class Trial:
    """Follows acceptance, and judges an update over the speculative steps before and after it.

    Args:
        most: speculative tokens the engine has room for.
        steps: speculative steps that are compared on either side.
        tolerance: share of the acceptance length that an update may cost; 1: any.
    """

    def __init__(self, most: int, steps: int, tolerance: float) -> None:
        self.most, self.steps, self.tolerance = most, max(1, steps), tolerance
        self._recent: deque[Tally] = deque(maxlen=self.steps)
        self._before: float | None = None

    @property
    def length(self) -> float:
        """Acceptance length over the last speculative steps, 0 before the first."""
        total = Tally(sum(t.tried for t in self._recent), sum(t.accepted for t in self._recent))
        return total.length(self.most)

    @property
    def running(self) -> bool:
        """Whether an update waits to be judged."""
        return self._before is not None

    def begin(self) -> float:
        """The drafter has new weights now; the acceptance length before."""
        before = self.length
        if (
            not self.running or before > self._before
        ):  # several updates in a row are judged by the best before
            self._before = before
        self._recent.clear()
        return before

    def abandon(self) -> None:
        """What is running is judged no more, and acceptance is counted anew."""
        self._before = None
        self._recent.clear()

    def step(self, tally: Tally) -> tuple[float, float, bool] | None:
        """A step has verified drafts.

        Returns:
            Once an update can be judged: the acceptance length before and after, and whether to keep it.
        """
        self._recent.append(tally)
        if self._before is None or len(self._recent) < self.steps:
            return None
        before, after, self._before = self._before, self.length, None
        return before, after, after >= before * (1 - self.tolerance)
