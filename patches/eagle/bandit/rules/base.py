"""Define what every rule offers to the policy, and what it is made for: arms, buckets of batch sizes, random numbers."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence

from flashpatch.patches.eagle.bandit.arm import Arm

BUCKETS = (*range(1, 32), *range(32, 121, 8), *range(128, 257, 32))
"""The largest batch size of each bucket; the last holds all larger sizes too. They follow the sizes for which engines record
CUDA graphs."""


def bucket_of(batch_size: int) -> int:
    """Return the bucket of a batch size of at least 1."""
    return min(bisect_left(BUCKETS, batch_size), len(BUCKETS) - 1)


class Rule(ABC):
    """Choose among arms, bucket by bucket.

    Args:
        arms: all arms; a rule names them by their place here.
        length: steps after which an observation should weigh little or nothing.
        random: the policy's random numbers."""

    hold = 1
    """Steps for which the policy keeps a choice."""
    best = 0.0
    """Tokens per second of the best allowed arm as the last `choose` estimated them; 0 if nothing is known."""

    def __init__(self, arms: tuple[Arm, ...], length: int, random: random.Random) -> None:
        self.arms, self.length, self.random = arms, length, random

    @abstractmethod
    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        """Choose one of ``allowed`` (never empty); ``current`` is the engine's present arm, or -1."""

    @abstractmethod
    def learn(self, bucket: int, batch: int, arm: int, tokens: float, seconds: float, switched: bool) -> None:
        """Learn from a step; ``switched`` when the step before ran another arm, so that its time includes the switch."""

    @abstractmethod
    def rates(self, bucket: int) -> Sequence[float]:
        """Return the estimated tokens per second of each arm in a bucket, 0 if nothing is known."""

    def refresh(self) -> None:  # noqa: B027
        """Trust less what was seen of the drafter, which has changed. Does nothing unless a rule can use it."""
