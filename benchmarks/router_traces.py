"""Traces for `router.py`: prompts, and how long their responses are.

    independent   every response drawn by itself (`longtail.py`): siblings tell nothing of one another
    groups        the same lengths over all, but a prompt's difficulty decides the mean of its responses: the logarithm
                  of a length is normal with deviation ``WITHIN`` around the prompt's, and those are normal too
    epoch         the same prompts an epoch later: other responses, all of them a tenth longer
    recorded      what a job of verl's did: a JSON line per response with step, prompt, prompt_tokens and tokens

A trace is a list of requests in the order in which they are submitted."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import longtail

SIBLINGS = 16
WITHIN = 0.35
"""Two thirds of a prompt's responses are at most 42% longer, or 30% shorter, than its median."""


@dataclass(frozen=True)
class Request:
    """A conversation; the next turn starts when one has ended.

    Attributes:
        prompt: what siblings share.
        tokens: length of the prompt.
        turns: lengths of its responses."""

    prompt: Hashable
    tokens: int
    turns: tuple[int, ...]


Trace = list[Request]


def independent(number: int, turns: int = 1, seed: int = 0) -> Trace:
    """So many responses, in conversations of ``turns``."""
    lengths, prompts = longtail.responses(number, seed), longtail.prompts(number)
    count = number // turns
    return [
        Request(at // SIBLINGS, prompts[at // SIBLINGS], tuple(lengths[at::count][:turns]))
        for at in range(count)
    ]


def groups(number: int, seed: int = 0, longer: float = 1.0) -> Trace:
    """So many responses; another ``seed`` draws other responses to the same prompts."""
    between = math.sqrt(longtail.SIGMA**2 - WITHIN**2)
    difficulty, draw = random.Random(-1), random.Random(seed)
    prompts, found = longtail.prompts(number), []
    for prompt in range(number // SIBLINGS):
        mean = difficulty.normalvariate(math.log(longtail.MEDIAN), between)
        for _ in range(SIBLINGS):
            length = min(longtail.LONGEST, 1 + int(longer * draw.lognormvariate(mean, WITHIN)))
            found.append(Request(prompt, prompts[prompt], (length,)))
    return found


def recorded(path: Path) -> list[Trace]:
    """The steps of a recorded job, oldest first: each the requests that were submitted at about the same time."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    steps: list[Trace] = []
    with opened as lines:
        for line in lines:
            one = json.loads(line)
            while len(steps) <= one["step"]:
                steps.append([])
            steps[one["step"]].append(Request(one["prompt"], one["prompt_tokens"], (one["tokens"],)))
    return [step for step in steps if step]
