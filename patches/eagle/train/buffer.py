"""Keep the newest samples over RL steps, bounded in number and bytes."""

from __future__ import annotations

import random
from collections import deque

from flashpatch.patches.eagle.capture.sample import Sample


class Buffer:
    """Hold the newest samples to draw from.

    Args:
        samples: most samples held.
        bytes: most bytes of tensors held.
        versions: hold samples of the newest so many policy versions only; 0 for all.
        seed: of the draws."""

    def __init__(self, samples: int = 10_000, bytes: int = 8 << 30, versions: int = 0, seed: int = 0) -> None:
        self.samples, self.bytes, self.versions = samples, bytes, versions
        self._random = random.Random(seed)
        self._held: deque[Sample] = deque()  # by age
        self._size = 0
        self._newest = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, sample: Sample) -> None:
        """Add a sample, unless it is of too old a policy or larger than the buffer."""
        if sample.version > self._newest:
            self._newest = sample.version
            self._held = deque(one for one in self._held if not self._is_stale(one))
            self._size = sum(one.bytes for one in self._held)
        if self._is_stale(sample) or sample.bytes > self.bytes:
            return
        self._held.append(sample)
        self._size += sample.bytes
        while len(self._held) > self.samples or self._size > self.bytes:
            self._size -= self._held.popleft().bytes

    def draw(self, number: int) -> list[Sample]:
        """Return up to ``number`` different samples at random."""
        return self._random.sample(self._held, min(number, len(self._held)))

    def _is_stale(self, sample: Sample) -> bool:
        return bool(self.versions) and sample.version <= self._newest - self.versions
