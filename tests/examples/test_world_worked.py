"""Worked answers of `examples/world`, and the comparison of two jobs' times."""

from __future__ import annotations

import json
import random
import subprocess
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


def _job(path: Path, rollouts: list[float], length: float) -> Path:
    rows = [
        {
            "step": step,
            "data": {
                "timing_s/gen": spent,
                "timing_s/step": spent + 10,
                "response_length/mean": length,
                "critic/score/mean": 0.5,
                "critic/rewards/mean": 0.5,
            },
        }
        for step, spent in enumerate(rollouts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_times_are_compared_per_token_without_the_first_step(tmp_path):
    stock = _job(tmp_path / "stock.jsonl", [100, 20, 20, 20], length=50)
    history = _job(
        tmp_path / "history.jsonl", [1, 5, 5, 5, 5], length=25
    )  # half the tokens in a quarter of the time
    command = [sys.executable, str(WORLD / "speed.py"), str(tmp_path / "speed.png"), str(stock), str(history)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rollouts 2.00 (2.00 to 2.00), steps 2.00 (2.00 to 2.00)" in done.stdout
    assert (
        "| stock | 60 | 90 | 50.0 | 0.50 |" in done.stdout
        and "| history | 15 | 45 | 25.0 | 0.50 |" in done.stdout
    )
