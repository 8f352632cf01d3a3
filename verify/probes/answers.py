"""What engines are asked, and how their answers, a list of logprobs per prompt, are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


def compare(
    steps: Mapping[str, tuple[str, str]], answers: Mapping[str, Answers], problem: str, no_reference: str
) -> Iterator[tuple[str, str, bool, str]]:
    """Yield step, what it shows, whether it is so, and the evidence; ``steps`` has what each shows, and whose answers it must give.

    After the perturbation they must have moved. ``problem`` says why a step was not reached, ``no_reference`` why there is none.
    """
    for step, (what, reference) in steps.items():
        got, wanted = answers.get(step), answers.get(reference)
        if not got:
            yield step, what, False, f"not reached: {problem}"
        elif not wanted:
            yield step, what, False, no_reference
        else:
            ok, size = equal(got, wanted), sum(map(len, got))
            evidence = f"{size} logprobs, largest difference {gap(got, wanted):.3g} to {reference}"
            if step == "perturbation":
                moved = gap(got, answers["before"])
                ok, evidence = ok and moved > 0, f"{evidence}, {moved:.3g} to before"
            yield step, what, ok, evidence
