"""Measure sampled answers to one question: how many are right, and how many different right ones there are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

KS = (1, 2, 4, 8, 16)


def pass_at(k: int, samples: int, right: int) -> float:
    """Estimate without bias the chance that one of ``k`` answers is right, from ``right`` of ``samples``
    (Chen et al., arXiv 2107.03374, section 2.1)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def effective_number(right: Sequence[str]) -> float:
    """``exp`` of the entropy of the right answers' shares; 0 where there is none. Few samples make it small."""
    if not right:
        return 0.0
    shares = [count / len(right) for count in Counter(right).values()]
    return math.exp(-math.fsum(share * math.log(share) for share in shares))


def measured(answers: Sequence[str], right: Sequence[bool]) -> dict[str, float]:
    """All measures of the answers to one question."""
    good = [text for text, is_right in zip(answers, right, strict=True) if is_right]
    found = {"reward": len(good) / len(answers)}
    found |= {f"pass@{k}": pass_at(k, len(answers), len(good)) for k in KS}
    return found | {"distinct": float(len(set(good))), "effective": effective_number(good)}


def mean_over(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each measure over questions."""
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}
