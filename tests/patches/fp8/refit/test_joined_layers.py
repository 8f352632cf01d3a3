"""Embeddings that the engine ties after its first load because the checkpoint's two copies are equal."""

import pytest

torch = pytest.importorskip("torch")

import fp8_toys as toys

from flashpatch.errors import PatchError


def with_equal_embeddings(seed: int) -> list[tuple[str, torch.Tensor]]:
    weights = dict(toys.checkpoint(seed))
    return list((weights | {"lm_head.weight": weights["embed.weight"].clone()}).items())


def tie(model: toys.Model) -> None:
    toys.process_all(model)
    model.lm_head.weight = model.embed.weight


def test_equal_values_are_taken(atomic):
    engine = toys.Engine(toys.Model(), with_equal_embeddings(0), tie, atomic=atomic)
    for seed in (1, 2):
        engine.update(with_equal_embeddings(seed))
        assert toys.same_answers(engine.model, toys.fresh("transposed", with_equal_embeddings(seed)))


def test_different_values_are_refused(atomic):
    """The last one written would have stood for both."""
    engine = toys.Engine(toys.Model(), with_equal_embeddings(0), tie, atomic=atomic)
    with pytest.raises(PatchError, match="share memory since, but were given different values"):
        engine.update(toys.checkpoint(1))
    assert engine.managed.may_generate == (atomic == "model")
    engine.update(with_equal_embeddings(2))
    assert toys.same_answers(engine.model, toys.fresh("transposed", with_equal_embeddings(2)))
