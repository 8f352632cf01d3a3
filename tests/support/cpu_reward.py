"""A reward that a random model earns now and then: the share of digits in the answer."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """verl's custom reward function."""
    return sum(letter.isdigit() for letter in solution_str) / max(1, len(solution_str))
