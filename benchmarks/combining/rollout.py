"""Simulate a rollout whose batch shrinks to the tail, and the training that follows or overlaps it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

CHUNK = 64  # most steps for which the context is taken as constant


@dataclass(frozen=True)
class StepCost:
    """Hold what a step computes.

    Attributes:
        verified: draft tokens verified per request.
        passes: passes of the drafter; 0 for drafts from history.
    """

    verified: float
    passes: int = 0


@dataclass(frozen=True)
class Drafting:
    """Hold one way to draft: its cost, and the tokens that a request gains in a step."""

    cost: StepCost
    gained: float


NONE = Drafting(StepCost(0.0), 1.0)


class Times(Protocol):
    """Tell the seconds of prompts and steps."""

    def prompt(self, tokens: int) -> float: ...

    def step(self, batch: float, cost: StepCost, context: float) -> float: ...


@dataclass
class Rollout:
    """Hold what a rollout took.

    Attributes:
        ends: (when a request was done, its place in ``lengths``), in order of time.
        steps: (batch size, drafts verified per request, number of steps, seconds) of each stretch.
    """

    seconds: float = 0.0
    tokens: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    steps: list[tuple[int, float, float, float]] = field(default_factory=list)


def best(times: Times, options: Sequence[Drafting], batch: int, context: float) -> Drafting:
    """Return the way to draft with the most tokens per second at this batch size."""
    return max(options, key=lambda way: way.gained / times.step(batch, way.cost, context))


def simulate(
    times: Times, options: Sequence[Drafting], lengths: Sequence[int], slots: int, prompt: int
) -> Rollout:
    """Generate all ``lengths`` with at most ``slots`` requests at once, first come first served.

    Each step uses the best of ``options`` for its batch and context. A prompt gives the first token and stops the batch
    for its time. Requests gain the mean at every step. A last step is whole too: half of what it gains beyond a token
    is lost in the mean, with the way to draft of a full batch.
    """
    done = Rollout()
    lost = (best(times, options, min(slots, len(lengths) or 1), prompt).gained - 1.0) / 2
    waiting, running = 0, []  # heap of (token count of the batch at which it ends, place)
    reached, sizes = 0.0, 0.0  # tokens per request since the start; sum of their starts, for the context
    starts: dict[int, float] = {}
    while waiting < len(lengths) or running:
        while waiting < len(lengths) and len(running) < slots:
            left = lengths[waiting] - 1
            heapq.heappush(running, (reached + left + (lost if left else 0.0), waiting))
            starts[waiting] = reached
            sizes += reached
            done.seconds += times.prompt(prompt)
            waiting += 1
        batch = len(running)
        context = prompt + reached - sizes / batch
        way = best(times, options, batch, context)
        count = min((running[0][0] - reached) / way.gained, CHUNK)
        each = times.step(batch, way.cost, context + way.gained * count / 2)
        reached = running[0][0] if count < CHUNK else reached + count * way.gained
        done.seconds += count * each
        done.steps.append((batch, way.cost.verified, count, count * each))
        while running and running[0][0] <= reached + 1e-9:
            _, place = heapq.heappop(running)
            sizes -= starts.pop(place)
            done.tokens += lengths[place]
            done.ends.append((done.seconds, place))
    return done


def train_ends(rollout: Rollout, lengths: Sequence[int], rate: float, share: float) -> tuple[float, float]:
    """Return when training ends after the whole rollout, and when it starts with the first full batch.

    Args:
        rate: tokens trained per second, by devices of its own.
        share: of all tokens in one batch of training.
    """
    total = sum(lengths)
    now, kept = 0.0, 0
    for when, place in rollout.ends:
        kept += lengths[place]
        if kept >= share * total:
            now, kept = max(now, when) + kept / rate, 0
    if kept:
        now = max(now, rollout.seconds) + kept / rate
    return rollout.seconds + total / rate, now
