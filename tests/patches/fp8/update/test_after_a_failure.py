"""What a sender may do that goes on after one of its calls has failed, or sends a tensor again."""

from contextlib import nullcontext

import fp8_toys as toys
import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.fp8 import stated

BIAS = "layers.1.norm.bias"


@pytest.mark.parametrize("after", [1, 3])
def test_a_first_sync_that_fails_within_its_first_call_has_an_anchor(atomic, after):
    engine, first, second = toys.engine(atomic=atomic), toys.checkpoint(1), toys.checkpoint(2)
    with pytest.raises(ConnectionError):
        engine.load(toys.broken_off(first[:6], after))
    with pytest.raises(PatchError):
        engine.load(first[6:])
    engine.load(second[:6])
    engine.managed.before_request()
    assert not engine.managed.may_generate
    engine.load(second[6:])
    engine.managed.before_request()
    assert engine.managed.may_generate and toys.same_answers(engine.model, toys.fresh("transposed", second))


def test_a_tensor_sent_again_asks_for_the_buffer_that_came_with_it(atomic):
    engine, weights = toys.engine(seed=None, atomic=atomic), toys.checkpoint(1)
    engine.managed.begin()
    engine.load(weights)
    engine.load([item for item in weights if item[0] == "layers.1.norm.weight"])
    with pytest.raises(PatchError, match=f"{BIAS} did not come"):
        engine.managed.finish()


@pytest.mark.parametrize("failed", [True, False])
def test_a_doubt_is_not_ended_by_a_part(atomic, failed):
    """Nor by a bucket that is sent again after its session has failed."""
    engine, weights = toys.engine(atomic=atomic), toys.checkpoint(1)
    if failed:
        engine.managed.begin()
        with pytest.raises(ConnectionError):
            engine.load(toys.broken_off(weights, 8))
    else:
        engine.load(weights[:1])
        engine.managed.begin()  # gives up what nobody had named
    with pytest.raises(PatchError, match="did not come|a named one has failed"):
        engine.load(weights[7:])
        engine.managed.finish(partial=True)
    with pytest.raises(PatchError, match="failed"):
        engine.managed.finish(partial=True)
    assert engine.takes(toys.checkpoint(2))


@pytest.mark.parametrize("sent", [0, 3])
def test_an_end_after_a_failure_says_so(atomic, sent):
    """A sender caught the error of its last bucket: under "model" the old policy stayed, and the end said nothing."""
    engine, weights = toys.engine(atomic=atomic), toys.checkpoint(1)
    engine.load(weights[:sent])
    with pytest.raises(ConnectionError):
        engine.load(toys.broken_off(weights[sent:], 2))
    for _ in range(2):
        engine.load([])  # a bucket that brings nothing ends no failure
        with pytest.raises(PatchError, match="last update failed|had failed before its end"):
            engine.managed.finish()
    engine.load(weights)
    engine.managed.finish()
    engine.managed.finish()  # as vLLM's post-processing does, whoever has ended it
    assert engine.managed.may_generate and toys.same_answers(engine.model, toys.fresh("transposed", weights))


def test_the_rest_of_a_failed_session_is_no_beginning(atomic):
    """Its first name became that with which unnamed updates begin, and their ordinary sender was refused for ever."""
    engine, first, second = toys.engine(atomic=atomic), toys.checkpoint(1)[::-1], toys.checkpoint(2)
    with pytest.raises(PatchError), stated.update([engine.managed], "a"):
        engine.load(first[:2])
        with pytest.raises(ConnectionError):
            engine.load(toys.broken_off(first[2:4], 1))
        for bucket in (first[4:6], first[6:]):
            with pytest.raises(PatchError, match="a named one has failed"):
                engine.load(bucket)
    for bucket in (second[:5], second[5:]):
        engine.load(bucket)
    engine.managed.before_request()
    assert engine.managed.may_generate and toys.same_answers(engine.model, toys.fresh("transposed", second))


def test_after_a_failed_part_only_a_whole_update_ends_it(atomic):
    """The layers of its last part were taken beside the old ones, where layers may be left out."""
    engine, weights = toys.engine(atomic=atomic, partial=True), toys.checkpoint(1)
    for items, last, end in (
        (weights[:5], False, nullcontext()),
        (toys.broken_off(weights[5:7], 1), False, pytest.raises(ConnectionError)),
        (weights[7:], True, pytest.raises(PatchError, match="did not come")),
        (weights, True, nullcontext()),
    ):
        with end, stated.part([engine.managed], "a", last):
            engine.load(items)
    assert engine.managed.may_generate and toys.same_answers(engine.model, toys.fresh("transposed", weights))
