"""A loader that at the end of a call which brought an embedding and no head fills the head from the embedding."""

import fp8_toys as toys
import pytest
import torch

from flashpatch.errors import PatchError

EMBEDDING, HEAD = "embed.weight", "lm_head.weight"


class Filling(toys.Model):
    """``drawn``: it draws all tensors before it writes any, as loaders of models with images do."""

    drawn = True

    def load_weights(self, weights):
        came = dict(weights) if self.drawn else {}
        loaded = super().load_weights(came.items() if self.drawn else seen(weights, came))
        if HEAD not in came and EMBEDDING in came:
            self.lm_head.weight.weight_loader(self.lm_head.weight, came[EMBEDDING])
        return loaded


class Passing(Filling):
    drawn = False


def seen(weights, came):
    for name, tensor in weights:
        came[name] = tensor
        yield name, tensor


class Scaling(toys.Model):
    def load_weights(self, weights):
        loaded = super().load_weights(weights)
        self.lm_head.weight.data.mul_(2)
        return loaded


def policy(seed, head=True):
    return dict(toys.checkpoint(seed, tied=not head))


def sent(weights, *order):
    """Buckets of one, those of ``order`` at their places: the first ones, then all others, then those after ``...``."""
    first = order[: order.index(...)] if ... in order else order
    last = order[len(first) + 1 :]
    names = [*first, *(name for name in weights if name not in order), *last]
    return [[(name, weights[name])] for name in names]


def opened(kind, first, atomic):
    return toys.Engine(kind("transposed"), None if first is None else list(first.items()), atomic=atomic)


def update(engine, buckets):
    engine.managed.begin()
    for bucket in buckets:
        engine.load(bucket)
    engine.managed.finish()


def answers_as(engine, kind, weights):
    other = kind("transposed")
    other.load_weights(list(weights.items()))
    toys.process_all(other)
    return engine.managed.may_generate and torch.equal(engine.model(toys.TOKENS), other(toys.TOKENS))


@pytest.mark.parametrize("first", [policy(0), policy(0, head=False), None], ids=["head", "none", "dummy"])
@pytest.mark.parametrize("order", [(HEAD, EMBEDDING), (HEAD, ..., EMBEDDING)], ids=str)
@pytest.mark.parametrize("kind", [Filling, Passing])
def test_a_head_that_a_later_call_would_overwrite_is_refused(atomic, first, order, kind):
    engine = opened(kind, first, atomic)
    with pytest.raises(PatchError, match=f"{kind.__name__} wrote over {HEAD} at the end of a call"):
        update(engine, sent(policy(1), *order))
    whole = policy(2)
    update(engine, [list(whole.items())])
    assert answers_as(engine, kind, whole)


@pytest.mark.parametrize("first", [policy(0), policy(0, head=False), None], ids=["head", "none", "dummy"])
@pytest.mark.parametrize("order", [(EMBEDDING, ..., HEAD), (..., EMBEDDING, HEAD)], ids=str)
def test_a_head_that_comes_last_is_the_head(atomic, first, order):
    engine = opened(Passing, first, atomic)
    for seed in (1, 2):
        update(engine, sent(policy(seed), *order))
        assert answers_as(engine, Filling, policy(seed))


@pytest.mark.parametrize("first", [policy(0, head=False), None], ids=["none", "dummy"])
@pytest.mark.parametrize("order", [(EMBEDDING,), (..., EMBEDDING)], ids=str)
def test_a_head_that_never_comes_is_the_embedding(atomic, first, order):
    engine = opened(Filling, first, atomic)
    for seed in (1, 2):
        update(engine, sent(policy(seed, head=False), *order))
        assert answers_as(engine, Filling, policy(seed, head=False))


def test_what_a_loader_does_at_the_end_of_each_call_is_done_once(atomic):
    engine = opened(Scaling, policy(0), atomic)
    update(engine, [list(policy(1).items())])
    assert answers_as(engine, Scaling, policy(1))
    with pytest.raises(PatchError, match=f"Scaling wrote over {HEAD} at the end of a call"):
        update(engine, sent(policy(2), HEAD))
