"""Names alone: what becomes of a tensor that comes, and which update it is of. `test_spec` and `test_spec_machine` try the whole."""

import logging
from contextlib import nullcontext, suppress

import fp8_toys as toys
import pytest
import torch
from safetensors.torch import save_file

from flashpatch.errors import PatchError
from flashpatch.patches.fp8 import model_registry, senders, stated
from flashpatch.patches.fp8.update.boundaries import Boundaries, Step


def test_a_session_that_is_whole_and_not_ended_is_told(caplog):
    """Its sender died in it, and another sent a whole policy since. U4."""
    caplog.set_level(logging.WARNING, logger="flashpatch.fp8")
    engine = toys.engine(atomic="model")
    engine.managed.begin()
    engine.load(toys.checkpoint(1)[:4])
    engine.managed.before_request()
    assert not caplog.records
    engine.load(toys.checkpoint(2))
    for _ in range(2):
        engine.managed.before_request()
        assert engine.managed.may_generate
    assert ["has not ended it" in record.message for record in caplog.records] == [True]


def test_a_whole_call_is_committed_before_another_update_begins(atomic):
    """It was given up, where nobody had asked for the policy between the two."""
    engine = toys.engine(atomic=atomic)
    engine.load(toys.checkpoint(1))
    with stated.update([engine.managed]):
        pass
    assert engine.managed.may_generate and toys.same_answers(
        engine.model, toys.fresh("transposed", toys.checkpoint(1))
    )


def test_the_anchor_that_comes_again_behind_all_layers_is_doubt(atomic):
    """Its loader ignores it: the call was taken for one that brings nothing, and the old policy answered."""
    engine, weights, table = (
        toys.engine(atomic=atomic),
        toys.checkpoint(1),
        [("rope.inv_freq", torch.ones(4))],
    )
    loads = engine.model.load_weights

    def known(items):
        return loads((name, tensor) for name, tensor in items if name != table[0][0])

    engine.managed.load(known, iter(table + weights[:7]))
    with pytest.raises(PatchError, match="rope.inv_freq came again"):
        engine.managed.load(known, iter(weights[7:] + table))


def steps(boundaries, call, *items):
    return [boundaries.arrive(name, call, value) for name, value in items]


def test_the_anchor_always_begins_anew():
    take, anew, skip = Step.TAKE, Step.ANEW, Step.SKIP
    names = Boundaries()
    names.begin(named=False)
    assert steps(names, 1, ("a", 1)) == [take]
    names.keep_anchor()
    assert steps(names, 2, ("b", 1)) == [take]
    assert steps(names, 3, ("b", 1)) == [skip] and not names.doubt
    assert steps(names, 4, ("a", 2), ("b", 2)) == [anew, take] and names.came == {"a": 4, "b": 4}
    assert steps(names, 5, ("c", 2)) == [take] and not names.doubt
    names.commit(by_name=False)
    names.begin(named=False)
    assert steps(names, 1, ("b", 3)) == [take]
    assert "b came first, where earlier updates began with a" in names.doubt


def test_what_fails_without_a_call_of_its_sender_lets_nobody_answer(monkeypatch):
    """A commit that a request makes, and what a session of another sender gives up: under "model" the old policy answered."""
    engine, weights = toys.engine(atomic="model"), toys.checkpoint(1)
    process = engine.managed.adapter.process
    monkeypatch.setattr(
        engine.managed.adapter, "process", lambda m: 1 / 0 if isinstance(m, toys.Attention) else process(m)
    )
    engine.load(weights)
    with pytest.raises(ZeroDivisionError):
        engine.managed.after_call()
    assert not engine.managed.may_generate
    monkeypatch.undo()
    assert engine.takes(weights)
    engine.load(toys.checkpoint(2)[:2])
    engine.managed.begin()
    engine.managed.finish()
    assert not engine.managed.may_generate and "given up" in engine.managed.policy().why_refused()


def test_values_that_are_not_known_equal_nothing():
    names = Boundaries()
    names.begin(named=False)
    steps(names, 1, ("a", None), ("b", None))
    assert steps(names, 2, ("b", None)) == [Step.ANEW] and names.doubt and not names.repeats


def test_what_a_restart_has_dropped_is_not_in_place():
    names = Boundaries()
    names.begin(named=False)
    steps(names, 1, ("a", 1)), steps(names, 2, ("k", 5)), steps(names, 3, ("a", 2)), steps(names, 4, ("b", 2))
    names.commit(by_name=False)
    names.begin(named=False)
    assert steps(names, 1, ("k", 5)) == [Step.TAKE] and not names.repeats


def test_a_call_that_leaves_layers_out_takes_nothing_along(atomic):
    engine = toys.engine(atomic=atomic)
    engine.load(toys.checkpoint(1)[4:5])
    with pytest.raises(PatchError, match="calls that nobody has named"):
        engine.load(toys.checkpoint(2)[10:11], partial=True)


@pytest.mark.parametrize(("trainer", "first"), [("OpenRLHF", 0), ("ms-swift", 2)])
def test_a_sender_that_died_in_its_bracket_leaves_nothing_to_the_next(trainer, first, atomic):
    """Nor to one of another trainer, for whose parts its own were taken."""
    engine, dead, sent = toys.engine(atomic=atomic), toys.checkpoint(1), toys.checkpoint(2)
    lacking = [item for item in sent if item[0] != dead[2][0]]
    for sender, items in (trainer, dead[first:4]), ("OpenRLHF", lacking):
        for name, tensor in items:
            last = name == sent[-1][0]
            with (
                pytest.raises(PatchError, match=dead[2][0]) if last else nullcontext(),
                stated.part([engine.managed], sender, last, name),
            ):
                engine.load([(name, tensor)])
    assert engine.managed.version == 0


def test_scales_that_came_once_after_dummy_weights_belong_to_every_update(atomic):
    """They came in a later call than the parameters, and a request between the two was answered by the old scales."""
    engine = toys.engine(seed=None, scales=True, atomic=atomic)
    assert engine.takes(toys.checkpoint(1, scales=True))
    weights = sorted(toys.checkpoint(2, scales=True), key=lambda item: "scale" in item[0])
    engine.load(weights[:-2])
    engine.managed.before_request()
    assert not engine.managed.may_generate
    engine.load(weights[-2:])
    engine.managed.before_request()
    assert engine.managed.may_generate
    assert toys.same_answers(engine.model, toys.fresh("transposed", weights))


def test_after_dummy_weights_the_checkpoint_says_which_shapes_come(atomic, tmp_path):
    """A cut matrix was committed, and every whole one refused from then on. W3."""
    weights = toys.checkpoint(1)
    save_file(dict(weights), tmp_path / "model.safetensors")
    engine = toys.engine(seed=None, atomic=atomic, stands_for=str(tmp_path))
    with pytest.raises(PatchError, match=r"lm_head.weight came as \[9, 4\], .* \[10, 4\]"):
        engine.update([*weights[:-1], ("lm_head.weight", weights[-1][1][:9])])
    assert engine.takes(weights)


def test_another_door_takes_an_update_over_and_what_is_refused_does_not(atomic, monkeypatch):
    engine = toys.engine(atomic=atomic)
    stated.begin([engine.managed], "first")
    engine.load(toys.checkpoint(1))
    engine.managed.asleep = True
    with pytest.raises(PatchError, match="sleeps"):
        stated.begin([engine.managed], "second")
    engine.managed.asleep = False
    stated.abandon([engine.managed], "its sender failed", "second")
    with pytest.raises(PatchError, match="another update began"), stated.ending([engine.managed], "TRL"):
        pass
    monkeypatch.setattr(model_registry, "get", lambda model: engine.managed)
    with pytest.raises(PatchError, match="another update began"):
        senders.finish_vllm_weight_reload(lambda *_, **more: engine.managed.finish(), engine.model)
    assert engine.managed.state == "open"
    engine.managed.begin()
    with pytest.raises(PatchError, match="another update began before the end"):
        stated.finish([engine.managed], "first")


@pytest.mark.parametrize("sent", [3, 99])
def test_an_end_after_another_doors_whole_update_is_refused(sent, atomic):
    """Its sender was told that its policy was in place."""
    engine, b = toys.engine(atomic=atomic), toys.checkpoint(1)
    stated.begin([engine.managed], "first")
    engine.load(b[:sent])
    engine.managed.begin()
    engine.load(toys.checkpoint(2))
    engine.managed.finish()
    with pytest.raises(PatchError, match="another update began before the end"):
        stated.finish([engine.managed], "first")
    stated.begin([engine.managed], "first")
    engine.load(b)
    engine.managed.finish()  # a door that ends this sender's own
    assert toys.same_answers(engine.model, toys.fresh("transposed", b))


@pytest.mark.parametrize("ended", [True, False])
def test_an_end_is_of_its_own_senders_update(ended, atomic):
    """Its sender was told that its policy was in place, and it was not."""
    engine, b, c = toys.engine(atomic=atomic), toys.checkpoint(1), toys.checkpoint(2)
    models = [engine.managed]
    stated.begin(models, "first")
    engine.load(b)
    stated.begin(models, "second")
    engine.load(c)
    if ended:
        stated.finish(models, "second")
        stated.begin(models, "third")
    with pytest.raises(PatchError, match="another update began before the end"):
        stated.finish(models, "first")
    stated.abandon(models, "its sender failed", "first")
    assert engine.managed.state == "open"
    if not ended:
        stated.finish(models, "second")
        assert toys.same_answers(engine.model, toys.fresh("transposed", c))


def test_a_drafters_bucket_that_failed_is_told_at_the_end(atomic):
    """Its sender had passed over the error, and was told that all is in place."""
    policy, drafter = toys.engine(atomic=atomic), toys.engine(atomic=atomic, role="drafter")
    weights, both = toys.checkpoint(1), [policy.managed, drafter.managed]
    with pytest.raises(PatchError, match="the drafter's part .* had failed"), stated.update(both):
        policy.load(weights)
        with suppress(ConnectionError):
            drafter.load(toys.broken_off(weights, 3))
    assert policy.managed.may_generate and toys.same_answers(policy.model, toys.fresh("transposed", weights))
