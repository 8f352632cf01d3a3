"""Compare updates with a model that has only ever loaded the new weights."""

import fp8_toys as toys
import pytest

from flashpatch.errors import PatchError


def test_an_update_equals_a_fresh_engine(method, atomic):
    engine = toys.engine(method, atomic=atomic)
    before = toys.state(engine.model)
    for round_, seed in enumerate((1, 0, 2), 1):
        assert engine.takes(toys.checkpoint(seed), method)
        assert engine.managed.version == round_ and engine.managed.may_generate
    assert toys.same_places(before, toys.state(engine.model))


@pytest.mark.parametrize("processed", [True, False])
@pytest.mark.parametrize("first", ["weights", "buffers"])
def test_after_dummy_weights_a_buffer_may_come_or_not(atomic, first, processed):
    """Nothing has taught whether checkpoints bring it; without, it is what the constructor made. What came once always comes."""

    def processes(module):
        return processed or not isinstance(module, toys.Norm)

    engine = toys.engine(seed=None, atomic=atomic, processes=processes)
    for seed, brought, each in ((1, False, True), (2, True, True), (3, True, False)):
        weights = toys.checkpoint(seed, buffers=brought)
        if first == "buffers":
            weights.sort(key=lambda item: not item[0].endswith(".bias"))
        for bucket in [[item] for item in weights] if each else [weights]:
            engine.load(bucket)
        engine.managed.finish()
        assert toys.same_answers(engine.model, toys.fresh("transposed", weights))
    with pytest.raises(PatchError, match="norm.bias"):
        engine.update(toys.checkpoint(1, buffers=False))
    assert engine.takes(toys.checkpoint(1))
