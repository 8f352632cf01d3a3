"""`examples/flowrl_model`: its task, its measures, and log-probabilities from a cache that a group shares."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(*names: str):
    """Import modules of the example, which find each other as scripts do, and forget them again."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(EXAMPLES / "flowrl_model"), str(EXAMPLES / "flowrl_exact")]
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if (
            getattr(sys.modules[name], "__file__", None)
            and EXAMPLES in Path(sys.modules[name].__file__).parents
        ):
            del sys.modules[name]


@pytest.fixture(scope="module")
def parts():
    yield from example("task", "answers", "summary")


def test_each_number_has_98_right_answers_and_no_other(parts):
    every = [f"{one}{sign}{other}" for one in range(1, 100) for sign in "+-" for other in range(1, 100)]
    for target in (10, 24, 41):
        right = {text for text in every if eval(text) == target}
        assert right == set(parts.task.RIGHT[target]) and len(right) == 98
        assert all(parts.task.value(text) == eval(text) for text in every)
    for text in ("", "5", "5+", "05+19", "5 + 19", "5+19 ", "5*5", "100-1", "5+19..."):
        assert parts.task.value(text) is None, text
    assert not set(parts.task.HELD_OUT) & set(parts.task.TRAINED)
    assert sorted(parts.task.HELD_OUT + parts.task.TRAINED) == list(parts.task.TARGETS)


def test_pass_at_k_is_the_share_of_draws_with_a_right_one(parts):
    for samples, right, k in [(6, 2, 1), (6, 2, 3), (5, 0, 2), (5, 5, 1), (6, 4, 3)]:
        draws = list(itertools.combinations([True] * right + [False] * (samples - right), k))
        share = sum(map(any, draws)) / len(draws)
        assert parts.answers.pass_at(k, samples, right) == pytest.approx(share)


def test_right_answers_are_counted_by_how_often_they_come(parts):
    texts = ["1+9", "1+9", "2+8", "2+8", "nothing"] + ["1+1"] * 11
    found = parts.answers.measured(texts, [True] * 4 + [False] * 12)
    assert found["reward"] == 0.25 and found["distinct"] == 2 and found["effective"] == pytest.approx(2)
    assert parts.answers.measured(["x"] * 16, [False] * 16)["effective"] == 0


def run(name, rate, seed, reward, distinct):
    measures = {"reward": reward, "distinct": distinct, "effective": distinct / 2}
    measures |= {f"pass@{k}": reward for k in (1, 2, 4, 8, 16)}
    start = {"step": 0, **{name: 0.25 for name in measures}}
    method = {"name": name, "rate": rate}
    end = {
        "held_out": measures,
        "trained": measures,
        "seconds": 1.0,
        "curve": [start, {"step": 9, **measures}],
    }
    return {"method": method, "seed": seed, **end}


def test_the_rate_with_the_highest_reward_is_kept_and_intervals_are_over_seeds(parts):
    tried = [run("A", 1e-5, 0, 0.5, 20), run("A", 2e-5, 0, 0.7, 10), run("B", 1e-5, 0, 0.6, 30)]
    best = parts.summary.best_rates(tried)
    assert [(kept["method"]["name"], kept["method"]["rate"]) for kept in best] == [("A", 2e-5), ("B", 1e-5)]
    runs = [*best, run("A", 2e-5, 1, 0.8, 14), run("B", 1e-5, 1, 0.6, 30)]
    text = parts.summary.tables(tried, runs)
    row = next(line for line in text.split("== ")[2].splitlines() if line.startswith("A "))
    assert "0.75 ± 0.64" in row and "12.00 ± 25.42" in row  # t for one degree of freedom is 12.71
    numbers = parts.summary.numbers(runs)
    assert numbers["distinct"]["B"] == [30, 0] and numbers["paths"]["A"]["reward"] == [0.25, 0.75]
