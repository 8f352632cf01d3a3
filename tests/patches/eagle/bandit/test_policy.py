import math

import pytest
from bandit_lab import ARMS, Engine, drive
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.patches.eagle.bandit import controller
from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.policy import Policy

steps = st.lists(
    st.tuples(st.integers(1, 600), st.floats(0.01, 1.0), st.floats(1e-4, 10.0)), min_size=1, max_size=50
)


def replay(policy, trace):
    chosen = []
    for batch, share, seconds in trace:
        arm = policy.select(batch)
        policy.update(batch, arm, share * batch * (arm.steps + 1), seconds)
        chosen.append(arm)
    return chosen


@settings(max_examples=12)
@given(trace=steps, guard=st.integers(1, 3000))
def test_the_guard_holds_for_every_batch(trace, guard):
    policy = Policy(ARMS, guard=guard, window=20)
    for arm, (batch, *_) in zip(replay(policy, trace), trace, strict=True):
        assert arm is Arm.DISABLE or arm.draft_tokens * batch <= guard


@pytest.mark.parametrize("p", [0.1, 0.6, 0.9])
def test_on_a_stationary_engine_little_is_lost(p):
    engine = Engine(p)
    best = max(map(engine.rate, map(Arm.parse, ARMS)))
    ran = drive(Policy(ARMS), engine, 2000)
    share = sum(count * engine.rate(arm) for arm, count in ran.items()) / 2000 / best
    assert share > 0.96, (share, ran)


def test_what_a_policy_cannot_believe_is_counted_and_forgotten():
    policy, clean = Policy(ARMS), Policy(ARMS)
    bad = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300, None, "x")
    for batch in (1, 4, 4):
        for one in (policy, clean):
            arm = one.select(batch)
            one.update(batch, arm, batch, 0.01)
    for value in bad:
        policy.update(4, arm, value, 0.01)
        policy.update(4, arm, 4.0, value)
    policy.update(0, arm, 1.0, 1.0)
    policy.update(4, Arm(9, 1, 10), 4.0, 0.01)
    policy.update(4, Arm.parse("1_1_2"), 9.0, 0.01)  # more than two tokens a row
    policy.update(4, arm, 1e-200, 0.01)  # less than a token: its square is 0
    assert policy.metrics()["ignored"] == 2 * len(bad) + 4
    assert {**policy.metrics(), "ignored": 0} == clean.metrics()
    assert [policy.select(4) for _ in range(50)] == [clean.select(4) for _ in range(50)]


@settings(max_examples=10)
@given(values=st.lists(st.tuples(st.floats(), st.floats()), max_size=60))
def test_no_observation_poisons_the_bandit(values):
    policy = Policy(ARMS, window=10)
    for tokens, seconds in values:
        policy.update(8, policy.select(8), tokens, seconds)
    policy.select(8)
    assert all(math.isfinite(value) for value in policy.metrics().values())


def test_speculation_that_does_not_pay_ends_disabled_and_comes_back_with_the_drafter():
    engine, policy = Engine(p=0.02), Policy(ARMS, window=200)
    drive(policy, engine, 600)
    assert drive(policy, engine, 1000)[Arm.DISABLE] > 800
    engine.p = 0.9
    drive(policy, engine, 1500)  # without a refresh: a rare step of the arm has to show it
    assert drive(policy, engine, 500)[Arm.DISABLE] < 50


def test_after_a_refresh_a_drafter_that_recovered_is_found_sooner():
    found = {}
    for refreshed in (True, False):
        engine, policy = Engine(p=0.02), Policy(ARMS, window=1000)
        drive(policy, engine, 2000, batch=16)
        engine.p = 0.9
        if refreshed:
            policy.refresh()
        found[refreshed] = drive(policy, engine, 600, batch=16)[Arm.DISABLE]
    assert found[True] < 0.5 * found[False], found


def test_what_is_learned_of_the_drafter_in_one_group_serves_the_others():
    engine, policy = Engine(p=0.9), Policy(ARMS)
    drive(policy, engine, 300, batch=8)
    assert drive(policy, engine, 40, batch=9)[Arm.parse("5_1_6")] > 32


def test_an_outlier_does_not_condemn_an_arm():
    engine, policy = Engine(p=0.9), Policy(ARMS)
    drive(policy, engine, 400)
    policy.update(4, Arm.parse("5_1_6"), 24.0, 500.0)
    assert drive(policy, engine, 100)[Arm.parse("5_1_6")] > 80


def test_a_cost_of_switching_makes_switches_rare():
    shares = {}
    for cost in (0.0, 3.0):
        policy, engine, before, switches = Policy(ARMS), Engine(0.65, cost=0.25), None, 0
        for _ in range(1500):
            arm = policy.select(4)
            tokens, seconds = engine.step(arm, 4)
            switches += arm != before
            policy.update(4, arm, tokens, seconds + cost * (before is not None and arm != before))
            before = arm
        shares[cost] = switches / 1500
        assert policy.metrics()["switches"] == switches
    assert shares[3.0] < 0.5 * shares[0.0], shares


def test_an_empty_batch_and_one_beyond_the_guard_are_not_speculated_on():
    policy = Policy(["3_1_4"], guard=100)
    assert policy.select(0) is policy.select(26) is policy.select(10**12) is Arm.DISABLE
    policy.update(26, Arm.DISABLE, 26.0, 0.1)
    assert policy.metrics()["ignored"] == 0
    assert str(policy.select(25)) == "3_1_4"


def test_choices_are_counted_by_arm_over_all_batch_sizes() -> None:
    ours = controller.Controller(Policy(ARMS))
    chosen: dict[str, int] = {}
    for step in range(300):
        batch = 1 + step % 40
        arm = ours.choose(batch)
        ours.policy.update(batch, arm, batch, 0.01)
        chosen[str(arm)] = chosen.get(str(arm), 0) + 1
    counted = {arm: count for arm, count in ours.policy.pulls().items() if count}
    assert counted == chosen and len(counted) == len(ARMS)


def test_acceptance_is_that_of_the_last_steps() -> None:
    ours = controller.Controller(Policy(ARMS))
    for accepted, length in ((16, 3.0), (0, 1.0)):
        for _ in range(100):
            ours.count_drafts(8, 24, accepted)
        assert ours.acceptance_length == length
