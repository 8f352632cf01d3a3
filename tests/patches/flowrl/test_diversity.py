"""How many different solutions responses are."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashpatch.patches.flowrl.diversity import effective, first_prompts, measure, normalize, solutions

LONG = "First add three and four to get seven, then double it, which makes fourteen in all."


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("The answer is 14.", "the  ANSWER\nis $14$!", True),
        ("3+4", "4+3", False),
        ("7 - 2", "7 2", False),
        (LONG, LONG.replace("fourteen in all", "fourteen altogether now"), False),
        (LONG * 4, LONG * 4 + " Done indeed.", True),
        (LONG, LONG.replace("First add", "Start: add"), True),  # one run of 14 differs
        ("4 + 1 = 5", "4+1=5", True),
        ("yes", "no", False),
    ],
)
def test_what_counts_as_one_solution(one, other, same):
    assert len(solutions([one, other])) == (1 if same else 2)


def test_each_solution_has_its_count():
    assert solutions(["a b c d", "x", "A b, c d", "y", "x."]) == [2, 2, 1]
    assert solutions([]) == []


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_the_effective_number_is_between_one_and_all(counts):
    found = effective(counts)
    assert 1 - 1e-9 <= found <= len(counts) + 1e-9
    assert effective([3] * len(counts)) == pytest.approx(len(counts))


@given(st.lists(st.text(max_size=30), max_size=12))
def test_every_response_is_counted_once(texts):
    assert sum(solutions(texts)) == len(texts)
    assert len(solutions(texts)) == len(solutions(texts * 2))
    assert all(normalize(normalize(text)) == normalize(text) for text in texts)


def test_means_are_over_prompts_and_right_ones_over_those_that_have_one():
    groups = {
        "p": [("1+4", True), ("4+1", True), ("4 + 1", True), ("2", False)],
        "q": [("3", False), ("3", False)],
        "r": [("9", True)],
    }
    found = measure(groups)
    entropy = -(1 / 3 * math.log(1 / 3) + 2 / 3 * math.log(2 / 3))
    assert found["flowrl/diversity/solutions"] == pytest.approx((3 + 1 + 1) / 3)
    assert found["flowrl/diversity/right_solutions"] == pytest.approx((2 + 1) / 2)
    assert found["flowrl/diversity/effective_right_solutions"] == pytest.approx((math.exp(entropy) + 1) / 2)
    assert set(measure({"q": groups["q"]})) == {"flowrl/diversity/solutions"}
    assert measure({}) == {}


def test_padding_and_later_prompts_are_left_out():
    keys = ["a_0_0", "b_0_0", "a_1_0", "c_0_0", "z_0_0"]
    tags = [{}, {}, {}, {}, {"is_padding": True}]
    assert first_prompts(keys, tags, 2) == ["a_0_0", "b_0_0", "a_1_0"]
    assert first_prompts(keys, tags, 9) == keys[:4]
    assert first_prompts(keys, tags, 0) == []
