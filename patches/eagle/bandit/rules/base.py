"""What every rule offers to the policy."""

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
    """What a rule is made for.

    Attributes:
        arms: all arms; a rule speaks of them by their place here.
        buckets: the batch-size buckets.
        window: steps after which an observation should weigh little or nothing.
        random: the policy's random numbers.
        table: arms by largest batch size, for the rules that go by one; None for a table made from the arms.
    """

    arms: tuple[Arm, ...]
    buckets: BatchBuckets
    window: int
    random: RandomTables
    table: tuple[tuple[int, int], ...] | None = None


class Rule(ABC):
    """Chooses among arms, bucket by bucket. Subclasses are made with a `Setting`."""

    hold = 1
    """Steps for which the policy keeps what was chosen."""
    best = 0.0
    """Tokens per second that the last `choose` believed the best allowed arm gives; 0 where nothing is
    known."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abstractmethod
    def choose(self, bucket: int, batch: int, allowed: tuple[int, ...], current: int) -> int:
        """Choose one of ``allowed`` (never empty); ``current`` is the engine's present arm, or -1."""

    @abstractmethod
    def learn(self, bucket: int, batch: int, arm: int, tokens: float, seconds: float, switched: bool) -> None:
        """Take in a step; ``switched`` when the step before ran another arm, so that its time has the
        cost."""

    @abstractmethod
    def rates(self, bucket: int) -> Sequence[float]:
        """Tokens per second that each arm is believed to give in a bucket, 0 where nothing is known."""

    def refresh(self) -> None:  # noqa: B027
        """The drafter changed: what was seen of it counts for less. Does nothing unless a rule can use it."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that was learned, fit for JSON."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Take up a `state` of the same rule and setting."""
