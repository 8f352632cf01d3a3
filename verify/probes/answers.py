"""What engines are asked, and how their answers, a list of logprobs per prompt, are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

VOCAB = 512
#: Every token id occurs; long enough that a whole block of the prefix cache is kept.
PROMPTS = tuple(list(range(start, VOCAB, 3)) for start in range(3))
TOKENS = 8
"""Of each greedy continuation."""

Answers = Sequence[Sequence[float]]


def buckets(checkpoint: str | Path, count: int = 5) -> Iterator[list[tuple[str, Any]]]:
    """Yield the weights of a checkpoint; neighbours, as shards of a fused layer are, come in different buckets."""
    from safetensors.torch import load_file

    weights = sorted(load_file(f"{checkpoint}/model.safetensors").items())
    for bucket in range(count):
        yield weights[bucket::count]


def pairs(one: Answers, other: Answers, skip: int = 0) -> Iterator[tuple[float, float]]:
    """Yield the logprobs at each position of both, less the last ``skip`` of each prompt."""
    for mine, its in zip(one, other, strict=True):
        yield from list(zip(mine, its, strict=True))[: len(mine) - skip]


def equal(one: Answers, other: Answers) -> bool:
    """Return whether every bit is the same, and none is NaN."""
    return [*map(len, one)] == [*map(len, other)] and all(mine == its for mine, its in pairs(one, other))


def gap(one: Answers, other: Answers) -> float:
    """Return the largest difference; infinite if the shapes differ."""
    if [*map(len, one)] != [*map(len, other)]:
        return float("inf")
    return max((abs(mine - its) for mine, its in pairs(one, other)), default=0.0)
