"""Define what every rule offers to the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.batch_buckets import BatchBuckets
from flashpatch.patches.eagle.bandit.random_tables import RandomTables


@dataclass(frozen=True)
class Setting:
    """Hold what a rule is made for.

    Attributes:
        arms: all arms; a rule names them by their place here.
        buckets: the batch-size buckets.
        window: steps after which an observation should weigh little or nothing.
        random: the policy's random numbers.
    """

    arms: tuple[Arm, ...]
    buckets: BatchBuckets
    window: int
    random: RandomTables


class Rule(ABC):
    """Choose among arms, bucket by bucket. Subclasses are made with a `Setting`."""

    hold = 1
    """Steps for which the policy keeps a choice."""
    best = 0.0
    """Tokens per second of the best allowed arm as the last `choose` estimated them; 0 if nothing is
    known."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abstractmethod
    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        """Choose one of ``allowed`` (never empty); ``current`` is the engine's present arm, or -1."""

    @abstractmethod
    def learn(self, bucket: int, batch: int, arm: int, tokens: float, seconds: float, switched: bool) -> None:
        """Learn from a step; ``switched`` when the step before ran another arm, so that its time includes the
        switch."""

    @abstractmethod
    def rates(self, bucket: int) -> Sequence[float]:
        """Return the estimated tokens per second of each arm in a bucket, 0 if nothing is known."""

    def refresh(self) -> None:  # noqa: B027
        """Trust less what was seen of the drafter, which has changed. Does nothing unless a rule can use
        it."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return all that was learned, fit for JSON."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state` of the same rule and setting."""
