"""Updates that leave whole layers out."""

import fp8_toy_derived as derived
import fp8_toys as toys
import pytest

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
    a, b = (derived.checkpoint(seed, 1, kind, scales) for seed in (0, 1))
    new = {name: tensor for name, tensor in b.items() if "k_scale" not in name}
    engine = toys.Engine(derived.Model("quantized", 1, kind), list(a.items()), atomic=atomic)
    engine.update(list(new.items()), partial=True)
    fresh = derived.Model("quantized", 1, kind)
    fresh.load_weights((a | new).items())
    toys.process_all(fresh)
    assert toys.same_answers(engine.model, fresh)
