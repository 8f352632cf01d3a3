"""Updates that leave whole layers out."""

import fp8_toy_derived as derived
import fp8_toys as toys
import pytest

from flashpatch.errors import PatchError

A, B = toys.checkpoint(0), toys.checkpoint(1)


FIRST = [item for item in B if item[0].startswith("layers.0.")]


@pytest.mark.parametrize("how", ["option", "finish", "load"])
def test_a_partial_update_leaves_whole_layers_out(how, atomic):
    engine = toys.engine(atomic=atomic, partial=how == "option")
    engine.load(FIRST, **({"partial": True} if how == "load" else {}))
    engine.managed.finish(**({"partial": True} if how == "finish" else {}))
    mixed = dict(A) | dict(FIRST)
    assert toys.same_answers(engine.model, toys.fresh("transposed", list(mixed.items())))
    assert engine.managed.version == 1


@pytest.mark.parametrize("kind", ["absorbed", "sinks"])
@pytest.mark.parametrize("scales", [False, True])
def test_what_a_layer_that_was_left_out_derives_from_others_is_new(kind, scales, atomic):
    """The attention layer's own scales do not come, its neighbours do."""
    a, b = (derived.checkpoint(seed, 1, kind, False, scales, True) for seed in (0, 1))
    new = {name: tensor for name, tensor in b.items() if "k_scale" not in name}
    engine = toys.Engine(derived.Model("quantized", 1, False, kind), list(a.items()), atomic=atomic)
    engine.update(list(new.items()), partial=True)
    fresh = derived.Model("quantized", 1, False, kind)
    fresh.load_weights((a | new).items())
    derived.process_all(fresh)
    assert toys.same_answers(engine.model, fresh)


@pytest.mark.parametrize("fault", ["failed", "abandoned", "restarted", "slept"])
def test_a_partial_update_cannot_mend_a_mixed_policy(fault):
    engine = toys.engine(partial=True)
    if fault == "failed":
        with pytest.raises(ConnectionError):
            engine.load(toys.broken_off(B, 8))
    elif fault == "abandoned":
        engine.load(B[:8])
        engine.managed.begin()
    elif fault == "restarted":
        engine.load(B[:8])
        engine.load(B[:1])
    else:
        engine.managed.mark_discarded()
    engine.load([item for item in A if item[0].startswith("layers.1.")])
    with pytest.raises(PatchError, match="did not come"):
        engine.managed.finish()
    assert not engine.managed.may_generate
    assert engine.takes(B)
    engine.update([item for item in A if item[0].startswith("layers.1.")])
    assert engine.managed.may_generate
