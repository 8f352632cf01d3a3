"""Worked answers of `examples/world`, and the comparison of two jobs' times."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

WORLD = Path(__file__).parents[2] / "examples" / "world"


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(WORLD))
    try:
        import reward
        import worked

        yield worked, reward
    finally:
        sys.path.remove(str(WORLD))
        for name in ("reward", "worked"):
            sys.modules.pop(name, None)


def test_a_worked_answer_takes_the_smallest_line_by_line(modules):
    worked, _ = modules
    assert worked.solution([31, 8, 52]) == "31 8 52 -> 8\n31 52 -> 31\n52 -> 52\nAnswer: [8, 31, 52]"


def test_the_last_line_is_what_counts(modules):
    worked, reward = modules
    rows = worked.rows(50, random.Random(1))
    assert len({row["prompt"][0]["content"] for row in rows}) == 50
    for row in rows:
        given = [int(number) for number in row["prompt"][0]["content"].split(": ")[1].split(", ")]
        truth, answer = row["reward_model"]["ground_truth"], worked.solution(given)
        assert 4 <= len(given) <= 6 and truth == str(sorted(given))

        def score(text, truth=truth, row=row):
            return reward.compute_score(row["data_source"], text, truth, row["extra_info"])

        assert score(answer) == score(f"{answer}<|im_end|>") == 1
        assert score(answer[:-1]) == score(answer + " and so on") == score("") == 0
