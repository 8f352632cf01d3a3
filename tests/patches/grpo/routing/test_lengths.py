"""Predicted lengths: siblings and past epochs tell as much as they do tell; running ones that they are long."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.patches.grpo.routing.lengths import Conversations, Lengths, digest


def error(within: float, between: float, epochs: int = 1, drift: float = 1.0) -> tuple[float, float]:
    """Mean squared error of the logarithm of the prediction, and of that of the running mean, for the last of
    eight siblings in the last epoch."""
    draw, lengths = random.Random(1), Lengths()
    prompts = [draw.normalvariate(6, between) for _ in range(300)]
    ours, mean, total, number = [], [], 0.0, 0
    for epoch in range(epochs):
        for prompt, middle in enumerate(prompts):
            for sibling in range(8):
                true = middle + draw.normalvariate(0, within) + epoch * math.log(drift)
                if epoch == epochs - 1 and sibling == (7 if epochs == 1 else 0) and prompt > 50:
                    ours.append((math.log(lengths.expect(prompt, 0.0)) - true) ** 2)
                    mean.append((total / number - true) ** 2)
                length = max(1, int(math.exp(true)))
                lengths.ended(prompt, length)
                total, number = total + math.log(length), number + 1
    return sum(ours) / len(ours), sum(mean) / len(mean)


@pytest.mark.parametrize("epochs, drift", [(1, 1.0), (2, 1.3)])
def test_siblings_and_the_last_epoch_tell_what_a_prompt_is_like(epochs, drift):
    ours, mean = error(0.3, 1.0, epochs, drift)
    assert ours < 0.35 * mean


def test_siblings_that_tell_nothing_are_not_believed():
    ours, mean = error(1.0, 0.01)
    # The expected value of a log-normal is half its variance above its middle.
    assert ours < mean + 0.5**2 + 0.1


def test_a_response_that_runs_on_makes_its_siblings_long():
    lengths = Lengths(100)
    for prompt in range(50):
        lengths.ended(prompt, 100 + prompt, seconds=(100 + prompt) / 10)  # ten tokens a second
    lengths.started("long", 0.0)
    expected = [lengths.expect("long", now) for now in (1.0, 30.0, 100.0, 1000.0)]
    assert expected == sorted(expected) and expected[0] == lengths.expect("new", 0.0)
    assert expected[2] > 2 * expected[0]
    lengths.stopped("long", 0.0)
    assert lengths.expect("long", 1000.0) == expected[0] and not lengths.running("long")


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 10**6), st.floats(0, 1e6), st.integers(0, 2)), max_size=60
    )
)
def test_any_history_gives_a_positive_finite_prediction(events):
    lengths = Lengths(1, remembered=3)
    for prompt, tokens, now, kind in events:
        if kind == 0:
            lengths.started(prompt, now)
        elif kind == 1:
            lengths.ended(prompt, tokens, now)
        else:
            lengths.stopped(prompt, now)
        assert 0 < lengths.expect(prompt, 2e6) < math.inf


def test_a_conversation_keeps_its_prompt_and_counts_its_turns():
    known = Conversations(remembered=2)
    first = known.begin("a", ("prompt", 3))
    assert first.key == known.begin("b", ("prompt", 3)).key == ("prompt", 0)
    first.tokens = 5  # aborted: it goes on
    assert known.begin("a", ("prompt and five tokens", 8)) is first and first.key == ("prompt", 0)
    first.over = True
    assert known.begin("a", ("longer", 20)).key == ("prompt", 1) and first.tokens == 0
    assert first.prompt_tokens == 3
    assert digest([1, 2, 3]) == digest((1, 2, 3)) != digest([1, 2, 4]) and digest(None)[1] == 0
