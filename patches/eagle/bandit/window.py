"""Keep sums over the last steps of a bucket, exact and without a pass over them."""

from __future__ import annotations

from collections import deque
from typing import Any


class Window:
    """Sum tokens, seconds and pulls per arm over the last ``length`` steps.

    Sums are updated with each step; they are computed again every ``length`` steps, so that rounding errors
    do not accumulate. An arm that left the window keeps the rate it had.

    Attributes:
        pulls: steps of each arm in the window.
        rate: tokens per second of each arm, the last known if it has left the window, 0 if never seen.
    """

    __slots__ = ("_since_sum", "_steps", "length", "pulls", "rate", "seconds", "seen", "tokens")

    def __init__(self, arms: int, length: int) -> None:
        self.length = length
        self.pulls = [0] * arms
        self.tokens = [0.0] * arms
        self.seconds = [0.0] * arms
        self.rate = [0.0] * arms
        self.seen = 0
        self._steps: deque[tuple[int, float, float]] = deque()
        self._since_sum = 0

    def add(self, arm: int, tokens: float, seconds: float) -> None:
        """Add a step and drop the oldest."""
        steps, rate = self._steps, self.rate
        steps.append((arm, tokens, seconds))
        self.pulls[arm] += 1
        self.tokens[arm] += tokens
        self.seconds[arm] += seconds
        rate[arm] = self.tokens[arm] / self.seconds[arm]
        self.seen += 1
        if len(steps) > self.length:
            old, gone, spent = steps.popleft()
            self.pulls[old] -= 1
            if self.pulls[old]:
                self.tokens[old] -= gone
                self.seconds[old] -= spent
                rate[old] = self.tokens[old] / self.seconds[old]
            else:  # exactly 0, without rounding errors
                self.tokens[old] = self.seconds[old] = 0.0
            self._since_sum += 1
            if self._since_sum >= self.length:
                self._sum_again()

    def _sum_again(self) -> None:
        self._since_sum = 0
        count = len(self.pulls)
        self.tokens, self.seconds = [0.0] * count, [0.0] * count
        for arm, tokens, seconds in self._steps:
            self.tokens[arm] += tokens
            self.seconds[arm] += seconds

    def state(self) -> dict[str, Any]:
        """Return all of it, fit for JSON."""
        plain = {name: getattr(self, name) for name in ("seen", "_since_sum")}
        lists = {name: list(getattr(self, name)) for name in ("pulls", "tokens", "seconds", "rate")}
        return {**plain, **lists, "_steps": [list(step) for step in self._steps]}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state`."""
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)
        self._steps = deque((int(arm), tokens, seconds) for arm, tokens, seconds in state["_steps"])
