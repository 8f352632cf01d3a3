"""Any sequence of updates, faults, sleeps and requests: each answer is of one committed policy, or is refused.

`Updates` is a state machine of hypothesis over toy models; the outcome of each call is predicted by `fp8_update_spec`,
answers are compared with models that have only ever seen one policy. A failure prints the shortest sequence found and
how to repeat it. ``--hypothesis-seed=N`` explores other sequences.
"""

import logging
import random
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import fp8_toy_derived as derived
import fp8_update_units as units
from fp8_update_spec import FAILS, OK
from fp8_update_units import Config, Runner, Stopped, Unit
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.vllm import worker

configs = st.builds(
    Config,
    method=st.sampled_from(units.METHOD_NAMES),
    kind=st.sampled_from(derived.KINDS),
    atomic=st.sampled_from(["layer", "model"]),
    partial=st.booleans(),
    tied=st.booleans(),
    scales=st.booleans(),
    dummy=st.booleans(),
)
which = st.integers(0, 3)  # one of the models
seeds = st.integers(0, 3)  # one of the checkpoints
orders = st.one_of(st.none(), st.integers(0, 99))  # of a checkpoint's tensors: as in the file, or shuffled
sizes = st.integers(1, 9)  # tensors in a bucket
steps = st.one_of(st.none(), st.none(), st.integers(1, 6))  # the post-processing that fails
endings = st.sampled_from([None, None, False, True])
DOORS = ("session", "verl", "one call", "reload", "partial")


def shuffled(items, order):
    return items if order is None else random.Random(order).sample(items, len(items))


class Updates(RuleBasedStateMachine):
    """One engine, and perhaps a second: each with a target and perhaps a drafter."""

    @initialize(config=configs)
    def open_engine(self, config):
        self.units, self.asleep = [Unit(config, Runner())], []

    def unit(self, index):
        return self.units[index % len(self.units)]

    def awake(self, index):
        """The model, or None while its memory is gone: nobody sends then."""
        unit = self.unit(index)
        return None if unit.runner in self.asleep else unit

    def load(self, unit, items, faulty=False, step=None, partial=None, then=None):
        """Send items through ``model.load_weights``; ``then``: what ends the sender."""
        tensors = [(name, units.tensor_of(unit.config, name, seed)) for name, seed in items]
        stream = iter(tensors) if then is None else units.broken_off(tensors, then)
        keywords = {} if partial is None else {"partial": partial}
        expected = unit.spec.load(items, partial)
        if step is not None:
            unit.fail_at(step)
        faulty = faulty or step is not None
        error = unit.call(
            FAILS if then is not None else expected,
            lambda: unit.model.load_weights(stream, **keywords),
            faulty,
        )
        unit.fault = None
        if error is not None:
            unit.sender = []
        return error

    # -- engines -------------------------------------------------------------------------------------------

    @precondition(lambda self: len({unit.runner for unit in self.units}) == 1)
    @rule(config=configs)
    def second_engine(self, config):
        self.units.append(Unit(config, Runner()))

    @precondition(lambda self: len(self.units) < 3)
    @rule(config=configs)
    def drafter(self, config):
        config = units.like(config, self.units[0].config)  # options are those of the engine
        self.units.append(Unit(config, self.units[0].runner, "drafter"))

    # -- a sender ------------------------------------------------------------------------------------------

    @rule(index=which, seed=seeds, order=orders, session=st.booleans(), scales=st.booleans())
    def new_sender(self, index, seed, order, session, scales):
        """The sender before it may have died; with ``session`` the update is opened by name."""
        if (unit := self.awake(index)) is None:
            return
        scales = None if unit.config.dummy or not scales else True
        unit.sender = shuffled([(name, seed) for name in unit.config.checkpoint(seed, scales)], order)
        if session:
            unit.call(unit.spec.begin(), unit.managed.begin)

    @rule(index=which, size=sizes, step=steps, partial=st.sampled_from([None, None, None, True]))
    def bucket(self, index, size, step, partial):
        if (unit := self.awake(index)) is None or not unit.sender:
            return
        items, unit.sender = unit.sender[:size], unit.sender[size:]
        self.load(unit, items, step=step, partial=partial)

    @rule(index=which, seed=seeds, order=st.integers(0, 99), size=sizes)
    def stray_bucket(self, index, seed, order, size):
        """Some tensors of some checkpoint, in a call of their own."""
        if (unit := self.awake(index)) is not None:
            items = shuffled([(name, seed) for name in unit.config.checkpoint(seed)], order)
            self.load(unit, items[:size])

    @rule(index=which, seed=seeds, twice=st.integers(0, 20), order=orders, size=sizes)
    def doubled_bucket(self, index, seed, twice, order, size):
        """One tensor twice in one call."""
        if (unit := self.awake(index)) is not None:
            items = shuffled([(name, seed) for name in unit.config.checkpoint(seed)], order)[:size]
            self.load(unit, [*items, (items[twice % len(items)][0], (seed + 1) % 4)])

    @rule(index=which, seed=seeds, order=orders, size=sizes, bad=st.integers(0, 20))
    def bucket_with_nan(self, index, seed, order, size, bad):
        if (unit := self.awake(index)) is not None:
            items = shuffled([(name, seed) for name in unit.config.checkpoint(seed)], order)[:size]
            items[bad % len(items)] = (items[bad % len(items)][0], None)
            self.load(unit, items)

    @rule(
        index=which,
        seed=seeds,
        order=orders,
        size=st.integers(0, 9),
        how=st.sampled_from(["unknown", "shape", "dtype"]),
    )
    def bucket_that_does_not_fit(self, index, seed, order, size, how):
        if (unit := self.awake(index)) is None:
            return
        items = shuffled([(name, seed) for name in unit.config.checkpoint(seed)], order)
        items, (name, _) = items[:size], items[size % len(items)]
        unit.spec.load(items)
        unit.spec._doubted = False  # the call ends before it is judged
        tensors = [(key, units.tensor_of(unit.config, key, value)) for key, value in items]
        unit.call(
            FAILS, lambda: unit.model.load_weights([*tensors, units.misfit(unit.config, name, seed, how)])
        )
        unit.sender = []

    @rule(index=which, size=st.integers(0, 9), how=st.sampled_from([ConnectionError, MemoryError, Stopped]))
    def sender_dies(self, index, size, how):
        if (unit := self.awake(index)) is not None:
            self.load(unit, unit.sender[:size], then=how("the sender died"))

    @rule(index=which, act=st.sampled_from(["begin", "finish", "close_if_empty", "before_request"]))
    def meanwhile(self, index, act):
        """Another call while a bucket loads: refused, or without effect; nothing is generated."""
        unit = self.awake(index)
        if unit is None or not unit.sender or unit.spec.hopeless:
            return
        items, unit.sender = unit.sender[:2], unit.sender[2:]
        tensors = [(name, units.tensor_of(unit.config, name, seed)) for name, seed in items]

        def stream():
            for item in tensors:
                yield item
                error = units.raised(getattr(unit.managed, act))
                assert (error is None) == (act == "before_request")
                assert not unit.managed.may_generate

        unit.call(unit.spec.load(items), lambda: unit.model.load_weights(stream()))

    # -- ends ----------------------------------------------------------------------------------------------

    @rule(index=which, partial=endings, step=steps)
    def finish(self, index, partial, step):
        if (unit := self.awake(index)) is None:
            return
        if step is not None:
            unit.fail_at(step)
        unit.call(unit.spec.finish(partial), lambda: unit.managed.finish(partial), faulty=step is not None)
        unit.fault, unit.sender = None, []

    @rule(index=which)
    def withdraw(self, index):
        if (unit := self.awake(index)) is not None:
            empty = unit.spec.is_open and not unit.spec.came
            if empty:
                unit.spec.finish(True)
            assert unit.managed.close_if_empty() == empty
            unit.check()

    @rule(index=which)
    def request(self, index):
        """What a step does: the engine core asks the worker, the worker checks once more."""
        runner = self.unit(index).runner
        own = [unit for unit in self.units if unit.runner is runner]
        expected = {}
        for unit in own:
            expected[unit] = OK if runner in self.asleep else unit.spec.request()
        reported = worker.report(types.SimpleNamespace(model_runner=runner), before_step=True)
        for unit in own:
            if expected[unit] == FAILS:
                unit.spec.failed()
            else:
                unit.bits = None if unit.spec._commits else unit.bits
                unit.spec.succeeded()
        self.one_policy_or_refused()
        assert [policy.role for policy in reported] == [unit.role for unit in own]
        broken = model_registry.first_unservable(model_registry.all_models(runner))
        assert (broken is None) == own[0].spec.serves and broken in (None, own[0].managed)

    @rule(index=which, seed=seeds, order=orders, cuts=st.integers(1, 9), door=st.sampled_from(DOORS))
    def complete_update(self, index, seed, order, cuts, door):
        """Every tensor once, without a fault: it is served, whatever was before, or its sender is told that it is not."""
        unit = self.awake(index)
        if unit is None or unit.spec.hopeless:
            return
        items = shuffled([(name, seed) for name in unit.config.checkpoint(seed)], order)
        if door in ("session", "reload"):
            unit.call(unit.spec.begin(), unit.managed.begin)
        elif unit.spec.came:
            return  # nobody can tell where what a dead sender sent ends
        if door in ("one call", "reload", "partial"):
            cuts = len(items)
        for start in range(0, len(items), cuts):
            error = self.load(unit, items[start : start + cuts], partial=door == "partial" or None)
            if error is not None:
                assert "`with flashpatch.update(engine):`" in str(error)
                assert not unit.managed.may_generate and "where this update begins" in unit.managed.error
                return
        if door in ("session", "reload", "verl") or unit.spec.named:
            unit.call(unit.spec.finish(None), unit.managed.finish)
        self.request(index)
        if unit.spec.unknown and unit.spec.is_open:
            assert "norm.bias" in unit.managed.policy().why_refused()
            return
        assert unit.managed.may_generate and set(unit.spec.served[0].items()) >= set(items)

    # -- sleep ---------------------------------------------------------------------------------------------

    @rule(index=which, often=st.integers(0, 3))
    def sleep(self, index, often):
        """Level 2; with atomic='model' rarely, since nothing can be sent afterwards."""
        unit = self.unit(index)
        own = [other for other in self.units if other.runner is unit.runner]
        if unit.runner in self.asleep or (own[0].config.atomic == "model" and often):
            return
        self.asleep.append(unit.runner)
        worker.worker_sleep(units.sleeping(own), types.SimpleNamespace(model_runner=unit.runner), 2)
        for other in own:
            if other.role == "target":
                other.spec.discard()
                other.sender = []

    @precondition(lambda self: self.asleep)
    @rule()
    def wake_up(self):
        runner = self.asleep.pop()
        worker.worker_wake_up(lambda worker, tags: None, types.SimpleNamespace(model_runner=runner))

    @invariant()
    def one_policy_or_refused(self):
        for unit in self.units:
            if unit.runner not in self.asleep:
                unit.check()

    def teardown(self):
        model_registry.restore_load_weights()


SETTINGS = settings(
    print_blob=True,
    suppress_health_check=list(HealthCheck),
    stateful_step_count=25,
    phases=[phase for phase in Phase if phase is not Phase.explain],
)


class TestQuick(Updates.TestCase):
    """The same sequences in every run."""

    settings = settings(SETTINGS, max_examples=60, derandomize=True, database=None)


@pytest.mark.full
class TestLong(Updates.TestCase):
    """Other sequences in every run."""

    settings = settings(SETTINGS, max_examples=3000, stateful_step_count=40)


@pytest.fixture(autouse=True)
def quiet(caplog):
    """What the transaction logs about faults that are meant."""
    caplog.set_level(logging.CRITICAL, logger="flashpatch.fp8")
