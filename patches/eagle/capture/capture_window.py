"""Choose which positions of a request are captured: all of a short one, one window of a long one.

A request's length is not known while it runs, so windows are drawn as they come: the n-th window of a request takes the
place of the one kept before with chance 1/n, which leaves each the same chance in the end (Vitter's reservoir of one)."""

from __future__ import annotations

import random
from collections.abc import Sequence

DRAWS = random.Random()
"""Apart from the engine's own random numbers."""


class CaptureWindow:
    """Hold the window of one request.

    Args:
        size: positions per window.

    Attributes:
        first: first position of the window that is kept.
        last: the last window that was seen, -1 if none was."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.first = 0
        self.last, self._drawn = -1, 0  # drawn: windows that were seen

    def advance(self, positions: Sequence[int]) -> bool:
        """Take up positions that were computed; return whether another window is kept now.

        Positions may come again, as those of rejected drafts and of preempted requests do. Windows of which nothing was
        computed, as their prefix was in the cache, do not count."""
        moved = False
        for window in sorted({position // self.size for position in positions}):
            if window > self.last:
                self.last = window
                self._drawn += 1
                if DRAWS.random() * self._drawn < 1:
                    moved = moved or self._drawn > 1
                    self.first = window * self.size
        return moved
