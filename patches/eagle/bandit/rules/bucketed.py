"""Choose epsilon-greedily among the arms that fit the batch size (FastRL's ``BEG``, with several arms per
range)."""

from __future__ import annotations

from bisect import bisect_right

from flashpatch.patches.eagle.bandit.rules.base import Setting
from flashpatch.patches.eagle.bandit.rules.greedy import Greedy
from flashpatch.patches.eagle.bandit.rules.predefined import THRESHOLDS


class BucketedGreedy(Greedy):
    """Offer smaller drafts to larger batches; each range of batch sizes has neighbouring arms to learn from.

    Every range has at least ``width`` drafting arms where there are as many, and ``disable`` if it is an arm.
    """

    width = 3

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        arms = setting.arms
        drafting = sorted(
            (arm for arm in range(len(arms)) if arms[arm].steps),
            key=lambda arm: arms[arm].draft_tokens,
            reverse=True,
        )
        off = [arm for arm in range(len(arms)) if not arms[arm].steps]
        ranges = len(THRESHOLDS)
        room = max(0, len(drafting) - self.width)
        self._fitting = []
        for place in range(ranges):
            first = round(place * room / (ranges - 1))
            self._fitting.append(frozenset(drafting[first : first + self.width] + off))
        self._cache: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}

    def fitting_arms(self, batch: int) -> frozenset[int]:
        """Return the arms that a batch size may use."""
        return self._fitting[bisect_right(THRESHOLDS, batch) - 1]

    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        key = bisect_right(THRESHOLDS, batch), allowed
        inside = self._cache.get(key)
        if inside is None:
            fitting = self.fitting_arms(batch)
            inside = self._cache[key] = tuple(arm for arm in allowed if arm in fitting) or allowed
        return super().choose(bucket, batch, inside, current)
