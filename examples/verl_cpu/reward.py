"""The reward of the sums: 1 for the right answer, nothing else."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """verl's custom reward function."""
    return float(solution_str.replace("<|end|>", "").strip() == ground_truth)
