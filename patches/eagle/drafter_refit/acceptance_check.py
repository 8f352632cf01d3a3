"""Compare the acceptance of new drafter weights with that of the weights before.

The measure is the chance that a draft is accepted, given that those before it were. It does not depend on how
many tokens the bandit happened to ask for. From it follows the acceptance length at the engine's number of
tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass
class DraftCounts:
    """Drafts tried and accepted. A draft behind a rejected one was not tried."""

    tried: int = 0
    accepted: int = 0

    def acceptance_length(self, max_drafts: int) -> float:
        """Return the expected tokens of a step of ``max_drafts`` drafts, the target's own included; 0 if none
        was tried."""
        if not self.tried:
            return 0.0
        chance = self.accepted / self.tried
        return sum(chance**k for k in range(max_drafts + 1))


class AcceptanceCheck:
    """Follow acceptance, and judge an update over the speculative steps before and after it.

    Args:
        max_drafts: speculative tokens the engine has room for.
        steps: speculative steps that are compared on either side.
        tolerance: share of the acceptance length that an update may cost; 1: any.
    """

    def __init__(self, max_drafts: int, steps: int, tolerance: float) -> None:
        self.max_drafts, self.steps, self.tolerance = max_drafts, max(1, steps), tolerance
        self._recent: deque[DraftCounts] = deque(maxlen=self.steps)
        self._before: float | None = None

    @property
    def acceptance_length(self) -> float:
        """Acceptance length over the last speculative steps, 0 before the first."""
        tried = sum(counts.tried for counts in self._recent)
        total = DraftCounts(tried, sum(counts.accepted for counts in self._recent))
        return total.acceptance_length(self.max_drafts)

    @property
    def running(self) -> bool:
        """Whether an update waits to be judged."""
        return self._before is not None

    def start(self) -> float:
        """Start to judge weights that have just been loaded; return the acceptance length before them."""
        before = self.acceptance_length
        if self._before is None or before > self._before:  # several updates in a row: the best before counts
            self._before = before
        self._recent.clear()
        return before

    def cancel(self) -> None:
        """Judge no update, and restart counting."""
        self._before = None
        self._recent.clear()

    def add(self, counts: DraftCounts) -> tuple[float, float, bool] | None:
        """Add a step that verified drafts.

        Returns:
            Once an update can be judged: the acceptance length before and after, and whether to keep it.
        """
        self._recent.append(counts)
        if self._before is None or len(self._recent) < self.steps:
            return None
        before, after, self._before = self._before, self.acceptance_length, None
        return before, after, after >= before * (1 - self.tolerance)
