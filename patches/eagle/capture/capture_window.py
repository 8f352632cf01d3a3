"""Choose which positions of a request are captured: all of a short one, one window of a long one.

A request's length is not known while it runs, so windows are drawn as they come: the n-th window of a request takes the
place of the one kept before with chance 1/n, which leaves each the same chance in the end (Vitter's reservoir of one).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


class CaptureWindow:
    """Hold the window of one request.

    Args:
        name: of the request; with ``seed`` it decides, so that every process draws the same.
        size: positions per window.

    Attributes:
        first: first position of the window that is kept.
        length: positions seen, from the request's beginning.
    """

    __slots__ = ("_drawn", "_last", "_name", "_seed", "first", "length", "size")

    def __init__(self, name: str, size: int, seed: int = 0) -> None:
        self._name, self._seed, self.size = name, seed, size
        self.first = self.length = 0
        self._last, self._drawn = -1, 0  # the last window that was seen, and how many were

    def advance(self, positions: Sequence[int]) -> bool:
        """Take up positions that were computed; return whether another window is kept now.

        Positions may come again, as those of rejected drafts and of preempted requests do. Windows of which nothing was
        computed, as their prefix was in the cache, do not count.
        """
        moved = False
        self.length = max(self.length, max(positions) + 1)
        for window in sorted({position // self.size for position in positions}):
            if window > self._last:
                self._last = window
                self._drawn += 1
                if self._chance(window) * self._drawn < 1:
                    moved = moved or self._drawn > 1
                    self.first = window * self.size
        return moved

    def _chance(self, window: int) -> float:
        """Return a number from 0 to 1 that depends on seed, name and window alone."""
        digest = hashlib.blake2b(f"{self._seed}:{self._name}:{window}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64
