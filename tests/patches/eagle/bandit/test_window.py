import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.patches.eagle.bandit.rules.windowed import Window


@settings(max_examples=30)
@given(
    length=st.integers(1, 12),
    seen=st.lists(st.tuples(st.integers(0, 2), st.floats(0.5, 1e6), st.floats(1e-6, 1e3)), max_size=80),
)
def test_running_sums_are_those_of_the_last_steps(length, seen):
    window = Window(3, length)
    for arm, tokens, seconds in seen:
        window.add(arm, tokens, seconds)
    inside = seen[-length:]
    for arm in range(3):
        mine = [(tokens, seconds) for one, tokens, seconds in inside if one == arm]
        assert window.pulls[arm] == len(mine)
        assert window.tokens[arm] == pytest.approx(sum(tokens for tokens, _ in mine), rel=1e-6, abs=1e-3)
        if mine:
            assert window.rate[arm] > 0
        elif not any(one == arm for one, _, _ in seen):
            assert window.rate[arm] == 0.0


def test_an_arm_that_left_the_window_keeps_its_rate():
    window = Window(2, 3)
    window.add(0, 10.0, 2.0)
    for _ in range(5):
        window.add(1, 1.0, 1.0)
    assert window.pulls == [0, 3]
    assert window.rate == [5.0, 1.0]
