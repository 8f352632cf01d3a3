"""Divide batch sizes into buckets: what pays at batch 4 need not pay at batch 64."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

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
