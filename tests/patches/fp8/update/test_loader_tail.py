"""A loader that at the end of a call which brought an embedding and no head fills the head from the embedding."""

import fp8_toys as toys
import pytest
import torch
from torch import nn

from flashpatch.errors import PatchError

EMBEDDING, HEAD = "embed.weight", "lm_head.weight"
FIRST = pytest.mark.parametrize("first", [toys.checkpoint(0), toys.checkpoint(0, tied=True), None])


class Passing(toys.Model):
    def load_weights(self, weights):
        came = {}
        loaded = super().load_weights((name, came.setdefault(name, tensor)) for name, tensor in weights)
        if HEAD not in came and EMBEDDING in came:
            self.fill(came[EMBEDDING])
        return loaded

    def fill(self, embedding):
        self.lm_head.weight.weight_loader(self.lm_head.weight, embedding)


class Drawing(Passing):
    """It draws all tensors before it writes any, as loaders of models with images do."""

    def load_weights(self, weights):
        return super().load_weights(list(weights))


class Whole(Passing):
    """It fills the padding too, and its head has a bias, which comes last."""

    def __init__(self):
        super().__init__()
        self.lm_head.bias = nn.Parameter(torch.zeros(4), requires_grad=False)

    def fill(self, embedding):
        self.lm_head.weight.data.copy_(self.embed.weight.data)


def one_by_one(weights, *last):
    return [[item] for item in sorted(weights, key=lambda item: item[0] in last and 1 + last.index(item[0]))]


def takes(engine, buckets):
    """Update by name; return whether the model answers as one of its kind that has only ever seen this policy."""
    engine.managed.begin()
    for bucket in buckets:
        engine.load(bucket)
    engine.managed.finish()
    other = type(engine.model)()
    other.load_weights([item for bucket in buckets for item in bucket])
    toys.process_all(other)
    return toys.same_answers(engine.model, other)


@FIRST
@pytest.mark.parametrize("kind", [Passing, Drawing, Whole])
def test_a_head_that_a_later_call_would_overwrite_is_refused(atomic, first, kind):
    bias = [("lm_head.bias", torch.ones(4))] if kind is Whole else []
    engine = toys.Engine(kind(), first and first + bias, atomic=atomic)
    with pytest.raises(PatchError, match=f"{kind.__name__} wrote over {HEAD} at the end of a call"):
        takes(engine, one_by_one(toys.checkpoint(1) + bias, HEAD, EMBEDDING, "lm_head.bias"))
    assert takes(engine, [toys.checkpoint(2) + bias])


@FIRST
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_comes_last_is_the_head_and_one_that_never_comes_the_embedding(atomic, first, tied):
    engine = toys.Engine(Passing(), first, atomic=atomic)
    for seed in (1, 2):
        assert takes(engine, one_by_one(toys.checkpoint(seed, tied=tied), EMBEDDING, HEAD))
