"""Define what every rule offers to the policy, and what it is made for: arms, buckets of batch sizes, random numbers."""

from __future__ import annotations

import functools
import random
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.errors import eagle_error

DEFAULT = (*range(1, 32), *range(32, 121, 8), *range(128, 257, 32))


class BatchBuckets:
    """Divide batch sizes into buckets, each named by its largest size; the last holds all larger sizes too.

    Args:
        edges: the largest batch size of each bucket, ascending. The default follows the sizes for which
            engines record CUDA graphs: each size up to 31, by 8 up to 120, by 32 up to 256.

    Raises:
        PatchError: the edges are not ascending positive integers.
    """

    def __init__(self, edges: Sequence[int] | None = None) -> None:
        self.edges = tuple(DEFAULT if edges is None else edges)
        valid = self.edges and all(type(edge) is int for edge in self.edges) and self.edges[0] >= 1
        if not valid or any(low >= high for low, high in zip(self.edges, self.edges[1:], strict=False)):
            raise eagle_error(
                "buckets",
                f"batch-size buckets are {list(self.edges)}.",
                "Give the largest batch size of each bucket, ascending, for example 1,2,4,8,16,32.",
            )
        self.last = len(self.edges) - 1
        self.table = [bisect_left(self.edges, size) for size in range(min(self.edges[-1], 65536) + 1)]

    def __len__(self) -> int:
        return len(self.edges)

    def index(self, batch_size: int) -> int:
        """Return the bucket of a batch size of at least 1."""
        if batch_size < len(self.table):
            return self.table[batch_size]
        return min(bisect_left(self.edges, batch_size), self.last)


LENGTH = 8191  # prime, so that a cycle over few arms does not repeat in step with it


class RandomTables:
    """Draw from tables made once per seed.

    Attributes:
        position: in the tables, the whole state.
    """

    __slots__ = ("position", "normals", "uniforms")

    def __init__(self, seed: int) -> None:
        self.uniforms, self.normals = _tables(seed)
        self.position = 0

    def uniform(self) -> float:
        """Return the next number in [0, 1)."""
        self.position = position = (self.position + 1) % LENGTH
        return self.uniforms[position]

    def below(self, count: int) -> int:
        """Return the next integer in [0, count)."""
        return int(self.uniform() * count)


@functools.lru_cache(maxsize=8)
def _tables(seed: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    source = random.Random(seed)
    uniforms = tuple(source.random() for _ in range(LENGTH))
    return uniforms, tuple(source.gauss(0.0, 1.0) for _ in range(LENGTH))


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
