"""Epsilon-greedy over a sliding window (FastRL's ``EG``, with the mean of the window for its median)."""

from __future__ import annotations

from flashpatch.patches.eagle.bandit.rules.windowed import Windowed


class Greedy(Windowed):
    """The arm with the highest rate, and one at random in a share ``epsilon`` of the steps."""

    epsilon = 0.1

    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        cold = self.cold(allowed)
        if cold >= 0:
            return cold
        rate = self.window(bucket).rate
        best = max(allowed, key=rate.__getitem__)
        self.best = rate[best]
        random = self.setting.random
        return allowed[random.below(len(allowed))] if random.uniform() < self.epsilon else best
