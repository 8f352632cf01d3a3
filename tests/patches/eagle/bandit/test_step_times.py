"""Seconds of a step, and what one group of batch sizes lends another."""

import pytest

from flashpatch.patches.eagle.bandit.rules.thompson import BORROWED, StepTimes


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


def test_the_newest_weigh_most() -> None:
    times = StepTimes(2, 0.95)
    for step in range(6000):
        times.add(step % 2, 1.0 if step < 5900 else 2.0, 1.0)
    assert times.mean == pytest.approx([2.0, 2.0], abs=0.02)
