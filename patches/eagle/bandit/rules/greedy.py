"""Choose epsilon-greedily over a sliding window (FastRL's ``EG``, with the window's mean instead of its
median)."""

from __future__ import annotations

from flashpatch.patches.eagle.bandit.rules.windowed import Windowed

EPSILON = 0.1  # share of choices at random


class Greedy(Windowed):
    """Choose the arm with the highest rate, and one at random in a share `EPSILON` of the steps."""

    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        unwarmed = self.unwarmed_arm(allowed)
        if unwarmed >= 0:
            return unwarmed
        rate = self.window(bucket).rate
        best = max(allowed, key=rate.__getitem__)
        self.best = rate[best]
        random = self.setting.random
        return allowed[random.below(len(allowed))] if random.uniform() < EPSILON else best
