"""Choose by UCB1 over a sliding window, on rewards between 0 and 1. FastRL's UCB1 takes tokens per second,
next to which the bonus is negligible."""

from __future__ import annotations

from math import log, sqrt

from flashpatch.patches.eagle.bandit.rules.windowed import Windowed


class Ucb1(Windowed):
    """Choose the arm with the highest rate, as a share of the best one's, plus ``scale * sqrt(2 ln N /
    n)``."""

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
