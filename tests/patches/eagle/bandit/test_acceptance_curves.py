"""What arms give at a level of acceptance, and how a level is followed."""

import random
from math import exp, sqrt
from statistics import fmean, pvariance

import pytest
from bandit_lab import Engine, drive

from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.policy import Policy
from flashpatch.patches.eagle.bandit.thompson import LAST, PER_UNIT, acceptance_curves, nearest_point

ARMS = tuple(map(Arm.parse, ("disable", "1_1_2", "4_1_5", "2_2_6", "3_4_8")))


def _gained(arm: Arm, chance: float, source: random.Random) -> int:
    """Tokens of one row whose every branch is accepted with the same chance."""
    for depth in range(arm.steps):
        if not any(source.random() < chance for _ in range(arm.topk)):
            return depth + 1
    return arm.steps + 1


@pytest.mark.parametrize("level", [-3.0, 0.0, 1.5])
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_mean_and_variance_are_those_of_drawn_rows(arm, level):
    source = random.Random(0)
    mean, _, variance = acceptance_curves((arm,))[0][nearest_point(level)]
    drawn = [_gained(arm, 1 / (1 + exp(-level)), source) for _ in range(20_000)]
    assert mean == pytest.approx(fmean(drawn), abs=5 * sqrt(variance / len(drawn)) + 1e-12)
    assert variance == pytest.approx(pvariance(drawn), rel=0.05, abs=0.011)


def test_the_slope_is_that_of_the_mean():
    for curve in acceptance_curves(ARMS):
        for at in range(1, LAST):
            across = (curve[at + 1][0] - curve[at - 1][0]) * PER_UNIT / 2
            assert curve[at][1] == pytest.approx(across, rel=0.01, abs=1e-4)


def test_a_drafter_that_drifts_under_one_arm_is_known_under_all():
    """Only the shortest arm runs while acceptance falls; what is believed of the longest falls with it."""
    arms = ["1_1_2", "5_1_6"]
    policy, engine = Policy(arms), Engine(p=0.9)
    drive(policy, engine, 400, batch=8)
    long = "batch_8/5_1_6/tokens_per_second"
    before = policy.metrics()[long]
    assert before == pytest.approx(8 * engine.rate(Arm.parse("5_1_6")), rel=0.1)
    engine.p, short = 0.3, Arm.parse("1_1_2")
    for _ in range(200):
        policy.update(8, short, *engine.step(short, 8))
    assert policy.metrics()[long] == pytest.approx(8 * engine.rate(Arm.parse("5_1_6")), rel=0.4)
    assert policy.metrics()[long] < 0.4 * before
