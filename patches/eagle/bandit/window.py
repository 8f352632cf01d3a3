"""Sums over the last steps of a bucket, exact and without a pass over them."""

from __future__ import annotations

from collections import deque
from typing import Any


class Window:
    """Per arm the tokens, seconds and pulls among the last ``length`` steps.

    Sums are kept running; they are made anew once per lap, so that rounding cannot pile up. An arm that left
    the window keeps the rate it had.

    Attributes:
        pulls: steps of each arm in the window.
        rate: tokens per second of each arm, the last known where it has left the window, 0 if never seen.
        spread: relative variance of a step's rate, over all arms.
    """

    __slots__ = ("_lap", "_ring", "length", "pulls", "rate", "seconds", "seen", "spread", "tokens")

    def __init__(self, arms: int, length: int) -> None:
        self.length = length
        self.pulls = [0] * arms
        self.tokens = [0.0] * arms
        self.seconds = [0.0] * arms
        self.rate = [0.0] * arms
        self.seen = 0
        self.spread = 0.1
        self._ring: deque[tuple[int, float, float]] = deque()
        self._lap = 0

    def add(self, arm: int, tokens: float, seconds: float) -> None:
        """Take in a step and let the oldest go."""
        ring, rate = self._ring, self.rate
        if self.pulls[arm]:
            off = tokens / (seconds * rate[arm]) - 1.0
            self.spread += (min(off * off, 1.0) - self.spread) * 0.02
        ring.append((arm, tokens, seconds))
        self.pulls[arm] += 1
        self.tokens[arm] += tokens
        self.seconds[arm] += seconds
        rate[arm] = self.tokens[arm] / self.seconds[arm]
        self.seen += 1
        if len(ring) > self.length:
            old, gone, spent = ring.popleft()
            self.pulls[old] -= 1
            if self.pulls[old]:
                self.tokens[old] -= gone
                self.seconds[old] -= spent
                rate[old] = self.tokens[old] / self.seconds[old]
            else:  # exactly nothing, not what rounding left of it
                self.tokens[old] = self.seconds[old] = 0.0
            self._lap += 1
            if self._lap >= self.length:
                self._sum_again()

    def _sum_again(self) -> None:
        self._lap = 0
        count = len(self.pulls)
        self.tokens, self.seconds = [0.0] * count, [0.0] * count
        for arm, tokens, seconds in self._ring:
            self.tokens[arm] += tokens
            self.seconds[arm] += seconds

    def state(self) -> dict[str, Any]:
        """Everything, fit for JSON."""
        plain = {name: getattr(self, name) for name in ("seen", "spread", "_lap")}
        lists = {name: list(getattr(self, name)) for name in ("pulls", "tokens", "seconds", "rate")}
        return {**plain, **lists, "_ring": [list(step) for step in self._ring]}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up a `state`."""
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)
        self._ring = deque((int(arm), tokens, seconds) for arm, tokens, seconds in state["_ring"])
