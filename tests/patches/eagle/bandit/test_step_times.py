"""Seconds of a step: what one group of batch sizes lends another, and how long a measurement is believed."""

import random
from collections import Counter

import pytest

from flashpatch.patches.eagle.bandit.policy import Policy
from flashpatch.patches.eagle.bandit.thompson import BORROWED, StepTimes


@pytest.fixture
def lender() -> StepTimes:
    times = StepTimes(4, 0.99)
    for arm, seconds in enumerate((1.0, 2.0, 3.0)):  # the last arm never ran
        for _ in range(3):
            times.add(arm, seconds, 1.0)
    return times


def test_what_was_lent_scales_with_the_first_whole_step(lender: StepTimes) -> None:
    times = StepTimes(4, 0.99, lender)
    assert times.mean == pytest.approx([1.0, 2.0, 3.0, 0.0]) and times.weight == [BORROWED] * 3 + [0.0]
    times.add(1, 5.0, 1.0)
    assert times.mean == pytest.approx([2.5, 5.0, 7.5, 0.0])
    times.add(2, 3.0, 1.0)
    assert times.mean[:2] == pytest.approx([2.5, 5.0]) and times.mean[2] < 3.5, "it scales once"


def test_a_step_that_is_not_to_be_believed_scales_nothing(lender: StepTimes) -> None:
    times = StepTimes(4, 0.99, lender)
    times.add(3, 9.0, 0.25)
    times.add(0, 1.5, BORROWED)
    assert times.mean[1:] == pytest.approx([2.0, 3.0, 9.0])
    times.add(1, 4.0, 1.0)
    assert times.mean[2:] == pytest.approx([6.0, 9.0]), "and what was seen here is no loan any more"
    assert times.mean[0] < 1.5


def _looks(noise: float, seed: int) -> int:
    """Steps that went to other arms than the one preferred, after the beginning."""
    policy = Policy(("disable", "1_1_2", "3_1_4"), seed=seed)
    source, ran = random.Random(seed), Counter()
    tokens, seconds = {"disable": 1, "1_1_2": 1.6, "3_1_4": 2.6}, {"disable": 1.0, "1_1_2": 1.2, "3_1_4": 1.6}
    for step in range(800):
        arm = policy.select(8)
        policy.update(8, arm, 8 * tokens[str(arm)], seconds[str(arm)] * source.lognormvariate(0.0, noise))
        if step >= 200:
            ran[str(arm)] += 1
    return 600 - ran.most_common(1)[0][1]


def test_other_arms_are_looked_at_again_where_times_spread():
    quiet, noisy = (sum(_looks(noise, seed) for seed in range(5)) for noise in (0.02, 0.6))
    assert quiet < 60 < 3 * quiet + 60 < noisy
