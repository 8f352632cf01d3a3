"""Choose by FastRL's rules, over a sliding window per bucket: epsilon-greedy, and UCB1."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from math import log, sqrt
from typing import Any

from flashpatch.patches.eagle.bandit.rules.base import BUCKETS, Rule

EPSILON = 0.1  # share of choices at random


class Window:
    """Sum tokens, seconds and pulls per arm over the last ``length`` steps.

    Attributes:
        pulls, seconds: of each arm in the window.
        rate: tokens per second of each arm, the last known if it has left the window, 0 if never seen."""

    def __init__(self, arms: int, length: int) -> None:
        self.rate = [0.0] * arms
        self.steps: deque[tuple[int, float, float]] = deque(maxlen=length)
        self._sum()

    def add(self, arm: int, tokens: float, seconds: float) -> None:
        """Add a step and drop the oldest."""
        self.steps.append((arm, tokens, seconds))
        self._sum()

    def _sum(self) -> None:
        count = len(self.rate)
        self.pulls, self.tokens, self.seconds = [0] * count, [0.0] * count, [0.0] * count
        for arm, tokens, seconds in self.steps:
            self.pulls[arm] += 1
            self.tokens[arm] += tokens
            self.seconds[arm] += seconds
        for arm, pulls in enumerate(self.pulls):
            if pulls:
                self.rate[arm] = self.tokens[arm] / self.seconds[arm]


class Windowed(Rule):
    """Keep a window per bucket. A new bucket starts with the rates of the nearest known one.

    Only arms that no bucket ever ran are warmed up by running them, ``warm_up`` steps each."""

    warm_up = 2

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._windows: list[Window | None] = [None] * len(BUCKETS)
        self._run = [0] * len(self.arms)

    def window(self, bucket: int) -> Window:
        """Return the window of a bucket."""
        return self._windows[bucket] or self._open(bucket)

    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        for arm in allowed:
            if self._run[arm] < self.warm_up:
                return arm
        return self.pick(self.window(bucket), allowed)

    @abstractmethod
    def pick(self, window: Window, allowed: tuple[int, ...]) -> int:
        """Choose one of ``allowed``, all of them warmed up, by a bucket's window; set `best`."""

    def learn(self, bucket: int, batch: int, arm: int, tokens: float, seconds: float, switched: bool) -> None:
        self._run[arm] += 1
        self.window(bucket).add(arm, tokens, seconds)

    def rates(self, bucket: int) -> Sequence[float]:
        window = self._windows[bucket]
        return window.rate if window else [0.0] * len(self.arms)

    def _open(self, bucket: int) -> Window:
        self._windows[bucket] = window = Window(len(self.arms), self.length)
        known = [other for other, seen in enumerate(self._windows) if seen and seen.steps]
        if known:
            nearest = min(known, key=lambda other: (abs(other - bucket), other))
            window.rate = [rate * BUCKETS[bucket] / BUCKETS[nearest] for rate in self._windows[nearest].rate]
        return window


class Greedy(Windowed):
    """Choose the arm with the highest rate, and one at random in a share `EPSILON` of the steps.

    FastRL's ``EG``, with the window's mean instead of its median."""

    def pick(self, window: Window, allowed: tuple[int, ...]) -> int:
        best = max(allowed, key=window.rate.__getitem__)
        self.best = window.rate[best]
        return self.random.choice(allowed) if self.random.random() < EPSILON else best


class Ucb1(Windowed):
    """Choose the arm with the highest rate, as a share of the best one's, plus ``scale * sqrt(2 ln N / n)``.

    FastRL's UCB1 takes tokens per second, next to which the bonus is negligible."""

    scale = 0.1

    def pick(self, window: Window, allowed: tuple[int, ...]) -> int:
        rate, pulls = window.rate, window.pulls
        best = self.best = max(rate[arm] for arm in allowed)
        wide = self.scale * sqrt(2.0 * log(len(window.steps) + 1.0))
        return max(allowed, key=lambda arm: rate[arm] / (best or 1.0) + wide / sqrt(pulls[arm] or 0.5))
