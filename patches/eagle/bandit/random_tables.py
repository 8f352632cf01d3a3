"""Random numbers that cost a table look-up and whose state is one integer."""

from __future__ import annotations

import functools
import random

LENGTH = 8191  # prime, so that a cycle over few arms does not repeat in step with it


class RandomTables:
    """Draws from tables made once per seed.

    Attributes:
        at: place in the tables, the whole state.
    """

    __slots__ = ("at", "normals", "uniforms")

    def __init__(self, seed: int) -> None:
        self.uniforms, self.normals = _tables(seed)
        self.at = 0

    def uniform(self) -> float:
        """The next number in [0, 1)."""
        self.at = at = (self.at + 1) % LENGTH
        return self.uniforms[at]

    def below(self, count: int) -> int:
        """The next integer in [0, count)."""
        return int(self.uniform() * count)


@functools.lru_cache(maxsize=8)
def _tables(seed: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    source = random.Random(seed)
    uniforms = tuple(source.random() for _ in range(LENGTH))
    return uniforms, tuple(source.gauss(0.0, 1.0) for _ in range(LENGTH))
