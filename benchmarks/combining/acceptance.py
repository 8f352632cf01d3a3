"""What drafts bring, from recorded jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bandit_traces import read

from .rollout import NONE, Drafting, StepCost

HISTORY = (0.93, 0.59)
"""Drafted per token and share accepted: SmolLM2-135M sorting numbers, batch 8, prompts new to history (docs/eagle.md)."""


def gains(paths: Sequence[Path]) -> list[float]:
    """Return tokens per request and step with 0, 1, 2... drafts: places over steps, over all recorded traces."""
    places: dict[int, float] = {}
    steps: dict[int, float] = {}
    for path in paths:
        for batch, pairs in read(path).steps:
            for arm, (tokens, _) in pairs.items():
                places[arm.steps] = places.get(arm.steps, 0.0) + 1.0
                steps[arm.steps] = steps.get(arm.steps, 0.0) + batch / tokens
    found: list[float] = []
    for drafts in sorted(places):
        found.append(max([places[drafts] / steps[drafts], *found[-1:]]))
    return found


def eagle(gained: Sequence[float]) -> list[Drafting]:
    """Return the ways to draft with a drafter, none among them; ``gained`` by number of drafts."""
    return [NONE, *(Drafting(StepCost(k, k), gained[k]) for k in range(1, len(gained)))]


def history(drafted: float, accepted: float) -> list[Drafting]:
    """Return the ways to draft from history: not at all, or as recorded.

    Of the tokens, ``drafted * accepted`` were drafts; each step gives one more, its own.
    """
    gained = 1.0 / (1.0 - drafted * accepted)
    return [NONE, Drafting(StepCost(drafted * gained), gained)]


def expected(chances: Sequence[float]) -> float:
    """Return the mean tokens of a step, given each draft's chance of acceptance where those before it were."""
    total, reached = 1.0, 1.0
    for chance in chances:
        reached *= chance
        total += reached
    return total
