"""Epsilon-greedy among the arms that fit a bucket of batch sizes (FastRL's ``BEG``, with buckets that differ
inside)."""

from __future__ import annotations

from bisect import bisect_right

from flashpatch.patches.eagle.bandit.rules.base import Setting
from flashpatch.patches.eagle.bandit.rules.greedy import Greedy
from flashpatch.patches.eagle.bandit.rules.predefined import THRESHOLDS


class BucketedGreedy(Greedy):
    """Arms by falling draft size over buckets of rising batch size; each bucket has neighbouring arms to
    learn of.

    Every bucket has at least ``width`` drafting arms where there are as many, and ``disable`` if it is an
    arm.
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
        buckets = len(THRESHOLDS)
        room = max(0, len(drafting) - self.width)
        self._buckets = []
        for bucket in range(buckets):
            first = round(bucket * room / (buckets - 1))
            self._buckets.append(frozenset(drafting[first : first + self.width] + off))
        self._kept: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}

    def bucket(self, batch: int) -> frozenset[int]:
        """The arms that a batch size may use."""
        return self._buckets[bisect_right(THRESHOLDS, batch) - 1]

    def choose(self, group: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        key = bisect_right(THRESHOLDS, batch), allowed
        inside = self._kept.get(key)
        if inside is None:
            fit = self.bucket(batch)
            inside = self._kept[key] = tuple(arm for arm in allowed if arm in fit) or allowed
        return super().choose(group, batch, inside, current)
