"""Choose by FastRL's rules, over a sliding window per bucket: epsilon-greedy, and UCB1."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import log, sqrt
from typing import Any

from flashpatch.patches.eagle.bandit.rules.base import Rule, Setting

EPSILON = 0.1  # share of choices at random


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


class Windowed(Rule):
    """Keep a window per bucket. A new bucket starts with one step per arm from the nearest known one.

    Only arms that no bucket ever ran are warmed up by running them, ``warm_up`` steps each.
    """

    warm_up = 2

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._windows: list[Window | None] = [None] * len(setting.buckets)
        self._run = [0] * len(setting.arms)

    def window(self, bucket: int) -> Window:
        """Return the window of a bucket."""
        return self._windows[bucket] or self._open(bucket)

    def unwarmed_arm(self, allowed: tuple[int, ...]) -> int:
        """Return an allowed arm whose warm-up is not over, or -1."""
        for arm in allowed:
            if self._run[arm] < self.warm_up:
                return arm
        return -1

    def learn(self, bucket: int, batch: int, arm: int, tokens: float, seconds: float, switched: bool) -> None:
        self._run[arm] += 1
        (self._windows[bucket] or self._open(bucket)).add(arm, tokens, seconds)

    def rates(self, bucket: int) -> Sequence[float]:
        window = self._windows[bucket]
        return window.rate if window else [0.0] * len(self.setting.arms)

    def _open(self, bucket: int) -> Window:
        self._windows[bucket] = window = Window(len(self.setting.arms), self.setting.window)
        edges = self.setting.buckets.edges
        known = [other for other, seen in enumerate(self._windows) if seen and seen.seen]
        if known:
            nearest = min(known, key=lambda other: (abs(other - bucket), other))
            scale = edges[bucket] / edges[nearest]
            source = self._windows[nearest]
            for arm, rate in enumerate(source.rate):
                if rate:
                    seconds = source.seconds[arm] / source.pulls[arm] if source.pulls[arm] else 1.0 / rate
                    window.add(arm, rate * scale * seconds, seconds)
        return window

    def state(self) -> dict[str, Any]:
        windows = {str(bucket): window.state() for bucket, window in enumerate(self._windows) if window}
        return {"windows": windows, "run": list(self._run)}

    def restore(self, state: dict[str, Any]) -> None:
        self._run = list(state["run"])
        self._windows = [None] * len(self.setting.buckets)
        for bucket, saved in state["windows"].items():
            self._windows[int(bucket)] = window = Window(len(self.setting.arms), self.setting.window)
            window.restore(saved)


class Greedy(Windowed):
    """Choose the arm with the highest rate, and one at random in a share `EPSILON` of the steps.

    FastRL's ``EG``, with the window's mean instead of its median.
    """

    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        unwarmed = self.unwarmed_arm(allowed)
        if unwarmed >= 0:
            return unwarmed
        rate = self.window(bucket).rate
        best = max(allowed, key=rate.__getitem__)
        self.best = rate[best]
        random = self.setting.random
        return allowed[random.below(len(allowed))] if random.uniform() < EPSILON else best


class Ucb1(Windowed):
    """Choose the arm with the highest rate, as a share of the best one's, plus ``scale * sqrt(2 ln N / n)``.

    FastRL's UCB1 takes tokens per second, next to which the bonus is negligible.
    """

    scale = 0.1

    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        unwarmed = self.unwarmed_arm(allowed)
        if unwarmed >= 0:
            return unwarmed
        window = self.window(bucket)
        rate, pulls = window.rate, window.pulls
        best = self.best = max([rate[arm] for arm in allowed])
        if best <= 0.0:
            return allowed[0]
        wide = self.scale * sqrt(2.0 * log(min(window.seen, window.length) + 1.0))
        top, chosen = -1.0, allowed[0]
        for arm in allowed:
            index = rate[arm] / best + wide / sqrt(pulls[arm] or 0.5)
            if index > top:
                top, chosen = index, arm
        return chosen
