"""Compare updates with a model that has only ever loaded the new weights."""

import itertools
import random

import pytest

torch = pytest.importorskip("torch")

import fp8_toys as toys

from flashpatch.errors import PatchError

A, B = toys.checkpoint(0), toys.checkpoint(1)


def test_the_first_load_learns_what_a_checkpoint_brings():
    engine = toys.engine("bare")
    params = {param.name: param for layer in engine.managed.layers for param in layer.params}
    assert params["layers.0.qkv.weight"].expected.covered == 3 * toys.HIDDEN**2
    assert list(params["layers.0.qkv.weight"].expected.names.values()) == [
        f"layers.0.{p}.weight" for p in "qkv"
    ]
    assert params["layers.0.norm.bias"].required
    assert not params["layers.0.attn.k_scale"].required
    assert engine.managed.state == "ready" and engine.managed.version == 0


def test_an_update_equals_a_fresh_engine(method, atomic):
    engine = toys.engine(method, atomic=atomic)
    before = toys.state(engine.model)
    for round_, seed in enumerate((1, 0, 2), 1):
        engine.update(toys.checkpoint(seed))
        assert toys.same_answers(engine.model, toys.fresh(method, toys.checkpoint(seed)))
        assert engine.managed.version == round_ and engine.managed.may_generate
    assert toys.same_places(before, toys.state(engine.model))


def test_all_state_equals_a_fresh_engines(method):
    engine = toys.engine(method)
    engine.update(B)
    assert toys.same_bits(toys.state(engine.model), toys.state(toys.fresh(method, B)))


def test_dummy_weights_are_followed_by_real_ones(method, atomic):
    engine = toys.engine(method, seed=None, atomic=atomic)
    for seed in (1, 2):
        weights = toys.checkpoint(seed, buffers=False)
        engine.update(weights)
        assert toys.same_answers(engine.model, toys.fresh(method, weights))


def test_an_update_of_dummy_weights_must_bring_everything():
    engine, weights = toys.engine(seed=None), toys.checkpoint(1, buffers=False)
    with pytest.raises(PatchError, match=r"layers.1.down.weight \(0 of 16 elements\)"):
        engine.update([item for item in weights if item[0] != "layers.1.down.weight"])
    engine.update(weights)
    assert toys.same_answers(engine.model, toys.fresh("transposed", weights))


@pytest.mark.parametrize("processed", [True, False])
@pytest.mark.parametrize("first", ["weights", "buffers"])
def test_after_dummy_weights_a_buffer_may_come_or_not(atomic, first, processed):
    """Nothing has taught whether checkpoints bring it; without, it is what the constructor made."""

    def processes(module):
        return processed or not isinstance(module, toys.Norm)

    engine = toys.engine(seed=None, atomic=atomic, processes=processes)
    for seed, brought, each in ((1, True, True), (2, False, True), (3, True, False)):
        weights = toys.checkpoint(seed, buffers=brought)
        if first == "buffers":
            weights.sort(key=lambda item: not item[0].endswith(".bias"))
        for bucket in [[item] for item in weights] if each else [weights]:
            engine.load(bucket)
        engine.managed.finish()
        assert toys.same_answers(engine.model, toys.fresh("transposed", weights))


class Scaled(toys.Model):
    """A module with a buffer and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


@pytest.mark.parametrize("at", [0, 5, 99])
def test_after_dummy_weights_a_buffer_may_come_alone(atomic, at):
    engine = toys.Engine(Scaled(), None, atomic=atomic)
    for seed in (1, 2):
        weights = toys.checkpoint(seed)
        weights.insert(at, ("scale", torch.tensor(seed + 0.5)))
        engine.update(weights)
        assert engine.model.scale.item() == seed + 0.5
    engine.update(toys.checkpoint(3))
    assert engine.model.scale.item() == 1


@pytest.mark.parametrize("method", ["bare", "transposed", "closure"])
def test_tied_weights(method, atomic):
    a, b = toys.checkpoint(0, tied=True), toys.checkpoint(1, tied=True)
    engine = toys.Engine(toys.Model(method, tied=True), a, atomic=atomic)
    engine.update(b)
    assert engine.model.lm_head.weight is engine.model.embed.weight
    assert toys.same_answers(engine.model, toys.fresh(method, b, tied=True))


@pytest.mark.parametrize("first,then", list(itertools.product([False, True], repeat=2)))
def test_scales_that_only_some_checkpoints_have(first, then, atomic):
    engine = toys.Engine(toys.Model(), toys.checkpoint(0, scales=first), atomic=atomic)
    weights = toys.checkpoint(1, scales=then)
    if first and not then:
        with pytest.raises(PatchError, match="layers.0.attn.k_scale"):
            engine.update(weights)
    else:
        engine.update(weights)
        assert toys.same_answers(engine.model, toys.fresh("transposed", weights))


@pytest.mark.parametrize("seed", range(12))
def test_any_order_and_cuts(seed, atomic):
    rng = random.Random(seed)
    method = rng.choice(list(toys.METHODS))
    engine = toys.engine(method, atomic=atomic)
    weights = rng.sample(B, len(B))
    points = sorted(rng.sample(range(1, len(B)), rng.randint(1, 6)))
    for bucket in toys.cut(weights, *points):
        engine.load(iter(bucket))
    engine.managed.finish()
    assert toys.same_answers(engine.model, toys.fresh(method, B)), (method, points)


def test_no_update_begins_while_the_memory_is_away(atomic):
    engine = toys.engine(atomic=atomic)
    engine.managed.asleep = True
    with pytest.raises(PatchError, match="the engine sleeps"):
        engine.load(B)
    engine.managed.asleep = False
    engine.update(B)
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))
