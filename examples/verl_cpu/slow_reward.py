"""The reward of the sums, from a judge that needs its time: most answers take a moment, a few take seconds.

So does a reward that runs tests or calls a model. The time depends on the question and the answer alone, hence two jobs
wait equally long for equal samples.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
from statistics import NormalDist
from typing import Any

MEDIAN = float(os.environ.get("JUDGE_MEDIAN", "0.3"))  # seconds
SPREAD = 1.0  # of the logarithm: one in a hundred takes ten times the median
LONGEST = 8.0  # seconds


def seconds(question: str, answer: str) -> float:
    """Return how long the judge takes."""
    drawn = hashlib.sha256(f"{question}|{answer}".encode()).digest()[:8]
    share = (int.from_bytes(drawn, "big") + 0.5) / 2**64
    return min(MEDIAN * math.exp(SPREAD * NormalDist().inv_cdf(share)), LONGEST)


async def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """verl's custom reward function."""
    answer = solution_str.replace("<|end|>", "").strip()
    await asyncio.sleep(seconds(ground_truth, answer))
    return float(answer == ground_truth)
