"""Group batch sizes: what the bandit learns of a step's time holds for one group."""

from __future__ import annotations

from bisect import bisect_left

BUCKETS = (*range(1, 32), *range(32, 121, 8), *range(128, 257, 32))
"""The largest batch size of each bucket; the last holds all larger sizes too. They follow the sizes for which engines record
CUDA graphs."""


def bucket_of(batch_size: int) -> int:
    """Return the bucket of a batch size of at least 1."""
    return min(bisect_left(BUCKETS, batch_size), len(BUCKETS) - 1)
