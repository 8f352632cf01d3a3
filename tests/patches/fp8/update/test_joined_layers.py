"""Embeddings that the engine ties after its first load because the checkpoint's two copies are equal."""

import fp8_toys as toys
import pytest
import torch

from flashpatch.errors import PatchError


def with_equal_embeddings(seed: int) -> list[tuple[str, torch.Tensor]]:
    weights = dict(toys.checkpoint(seed))
    return list((weights | {"lm_head.weight": weights["embed.weight"].clone()}).items())


def tie(model: toys.Model) -> None:
    toys.process_all(model)
    model.lm_head.weight = model.embed.weight


@pytest.mark.parametrize("name", ["embed.weight", "lm_head.weight"])
def test_one_of_two_that_share_memory_is_enough(method, atomic, name):
    """A trainer whose model is tied sends one. What the other derives from the values is derived again."""
    engine = toys.Engine(toys.Model(method), with_equal_embeddings(0), tie, atomic=atomic)
    for seed in (1, 2):
        weights = with_equal_embeddings(seed)
        engine.update([item for item in weights if item[0] != name])
        assert toys.same_answers(engine.model, toys.fresh(method, weights))


def test_the_other_alone_with_the_same_values_is_no_update(atomic):
    engine = toys.Engine(toys.Model(), with_equal_embeddings(0), tie, atomic=atomic)
    weights = with_equal_embeddings(1)
    engine.load(weights[:3])
    engine.load(weights[3:-1])
    engine.managed.before_request()
    assert engine.managed.version == 1
    engine.load(weights[-1:])
    assert engine.managed.state == "ready" and engine.managed.version == 1 and engine.managed.may_generate
    with pytest.raises(PatchError, match="came first"):
        engine.load(with_equal_embeddings(2)[-1:])
    engine.managed.begin()
    assert engine.takes(weights)
