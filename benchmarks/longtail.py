"""Response lengths as reasoning RL sees them, for the simulations beside this file.

Log-normal with median 500 and 99th percentile 5,000 tokens (sigma = ln 10 / 2.326 = 0.99), cut off at 16,384:
the distribution that https://jiahuanglin.xyz/all_lessons/RL/lessons/22b_longtail_rollouts.html gives for a
typical run; arXiv 2605.30859 describes the same shape. Prompts are uniform between 50 and 400 tokens."""

from __future__ import annotations

import math
import random

MEDIAN, P99, LONGEST = 500, 5000, 16_384
SIGMA = math.log(P99 / MEDIAN) / 2.326


def responses(number: int, seed: int = 0) -> list[int]:
    """Lengths of responses, in tokens."""
    draw = random.Random(seed)
    return [min(LONGEST, 1 + int(draw.lognormvariate(math.log(MEDIAN), SIGMA))) for _ in range(number)]


def prompts(number: int, seed: int = 1) -> list[int]:
    """Lengths of prompts, in tokens."""
    draw = random.Random(seed)
    return [draw.randint(50, 400) for _ in range(number)]
