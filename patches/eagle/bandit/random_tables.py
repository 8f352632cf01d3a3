"""Draw random numbers at the cost of a table look-up; the state is one integer."""

from __future__ import annotations

import functools
import random

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
