"""Measure how many drafts the target accepts; knows no framework."""

from __future__ import annotations

from collections import deque

STEPS = 64
"""Speculative steps that are measured over, the last ones."""


class Acceptance:
    """Measure the acceptance length of one drafter over its last `STEPS` speculative steps.

    It follows from the chance that a draft is accepted, given that those before it were. So it does not depend on how many
    tokens the bandit happened to ask for.

    Args:
        max_drafts: speculative tokens the engine has room for."""

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._recent: deque[tuple[int, int]] = deque(maxlen=STEPS)

    def add(self, tried: int, accepted: int) -> None:
        """Add the drafts of a step that verified some. A draft behind a rejected one was not tried."""
        self._recent.append((tried, accepted))

    def restart(self) -> None:
        """Forget all steps: other weights draft from now on."""
        self._recent.clear()

    @property
    def length(self) -> float:
        """Expected tokens of a step of ``max_drafts`` drafts, the target's own included; 0 if none was tried."""
        tried, accepted = (sum(counts) for counts in zip(*self._recent)) if self._recent else (0, 0)
        return sum((accepted / tried) ** k for k in range(self.max_drafts + 1)) if tried else 0.0
