"""FastRL's rules as published, written anew from a reading of them, to compare with. Not for use.

Their reward is tokens per second of a step, the value of an arm the median of its last 300. There is no
warm-up: an arm never tried has value 0 and is met by chance only. Speculation is on up to batch 32."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from statistics import median

from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.buckets import bucket_of

GUARD, WINDOW, EPSILON, SPECULATE_UP_TO = 2048, 300, 0.1, 32
THRESHOLDS = (1, 2, 5, 21)


class PublishedGreedy:
    """``EG``: epsilon-greedy on medians, one per batch-size bucket."""

    def __init__(self, arms: tuple[Arm, ...], seed: int) -> None:
        self.arms = [arm for arm in arms if arm.steps]
        self._random = random.Random(seed)
        self._seen: dict[tuple[int, Arm], deque[float]] = {}

    def select(self, batch: int) -> Arm:
        fit = [arm for arm in self.fitting(batch) if arm.draft_tokens * batch <= GUARD]
        if batch > SPECULATE_UP_TO or not fit:
            return Arm.DISABLE
        if self._random.random() < EPSILON:
            return self._random.choice(fit)
        bucket = bucket_of(batch)
        return max(fit, key=lambda arm: self._value(bucket, arm))

    def fitting(self, batch: int) -> list[Arm]:
        """The arms considered at a batch size."""
        return self.arms

    def update(self, batch: int, arm: Arm, tokens: float, seconds: float) -> None:
        key = bucket_of(batch), arm
        self._seen.setdefault(key, deque(maxlen=WINDOW)).append(tokens / seconds)

    def _value(self, bucket: int, arm: Arm) -> float:
        seen = self._seen.get((bucket, arm))
        return median(seen) if seen else 0.0


class PublishedBucketed(PublishedGreedy):
    """``BEG``: arms of one draft size belong to one bucket of batch sizes, the largest drafts to the
    smallest."""

    def fitting(self, batch: int) -> list[Arm]:
        sizes = sorted({arm.draft_tokens for arm in self.arms}, reverse=True)
        bucket = min(bisect_right(THRESHOLDS, batch) - 1, len(sizes) - 1)
        return [arm for arm in self.arms if arm.draft_tokens == sizes[bucket]]


PUBLISHED = {"fastrl_eg": PublishedGreedy, "fastrl_beg": PublishedBucketed}
