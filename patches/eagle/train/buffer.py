"""Keep samples over RL steps, bounded in number and bytes; the file of a sample that leaves is deleted."""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

from flashpatch.patches.eagle.capture.sample import Sample
from flashpatch.patches.eagle.errors import eagle_error

KEEP = ("reservoir", "recency")


class Buffer:
    """Hold a bounded set of samples to draw from.

    Args:
        samples: most samples held.
        bytes: most bytes of tensors held.
        keep: ``reservoir`` gives every sample ever added the same chance to be in (Vitter's algorithm R);
            ``recency`` holds the newest.
        versions: hold samples of the newest so many policy versions only; 0 for all.
        seed: of the draws.

    Attributes:
        counts: ``added``, ``evicted``, ``refused`` (not drawn into the reservoir, or larger than the buffer)
            and ``stale`` (of too old a version).

    Raises:
        PatchError: a bound below 1, or an unknown way to keep.
    """

    def __init__(
        self,
        samples: int = 10_000,
        bytes: int = 8 << 30,
        keep: Literal["reservoir", "recency"] = "recency",
        versions: int = 0,
        seed: int = 0,
    ) -> None:
        if samples < 1 or bytes < 1 or versions < 0 or keep not in KEEP:
            raise eagle_error(
                "buffer",
                f"a buffer of {samples} samples, {bytes} bytes, {versions} versions "
                f"by {keep!r} is not possible.",
                f"Give positive bounds and one of {', '.join(KEEP)}.",
            )
        self.samples, self.bytes, self.keep, self.versions = samples, bytes, keep, versions
        self.counts: Counter[str] = Counter(added=0, evicted=0, refused=0, stale=0)
        self._random = random.Random(seed)
        self._held: list[Sample] = []  # by age, under recency; in no order, as a reservoir
        self._size = 0
        self._seen = 0
        self._newest = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, sample: Sample) -> bool:
        """Add a sample; return False when it was not kept."""
        if self.versions and self._held and sample.version > self._newest:
            self._drop_before(sample.version - self.versions + 1)
        self._newest = max(self._newest, sample.version)
        if self.versions and sample.version <= self._newest - self.versions:
            self.counts["stale"] += 1
            sample.delete_file()
            return False
        self._seen += 1
        full = self.keep == "reservoir" and len(self._held) >= self.samples
        if sample.bytes > self.bytes or (full and self._random.random() >= self.samples / self._seen):
            self.counts["refused"] += 1
            sample.delete_file()
            return False
        while self._held and (len(self._held) >= self.samples or self._size + sample.bytes > self.bytes):
            self._evict(0 if self.keep == "recency" else self._random.randrange(len(self._held)))
        self._held.append(sample)
        self._size += sample.bytes
        self.counts["added"] += 1
        return True

    def draw(self, number: int) -> list[Sample]:
        """Return up to ``number`` different samples at random."""
        return self._random.sample(self._held, min(number, len(self._held)))

    def _evict(self, place: int) -> None:
        sample = self._held.pop(place)
        self._size -= sample.bytes
        self.counts["evicted"] += 1
        sample.delete_file()

    def _drop_before(self, version: int) -> None:
        fresh = [sample for sample in self._held if sample.version >= version]
        for sample in self._held:
            if sample.version < version:
                self.counts["stale"] += 1
                sample.delete_file()
        self._held, self._size = fresh, sum(sample.bytes for sample in fresh)
