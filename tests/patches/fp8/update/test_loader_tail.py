"""A loader that fills the head from the embedding if its call, or the part of it that it was given, brought no head."""

import itertools
from contextlib import nullcontext

import fp8_toys as toys
import pytest
import torch
from torch import nn

from flashpatch.errors import PatchError

EMBEDDING, HEAD = "embed.weight", "lm_head.weight"


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


class Grouped(Passing):
    """A loader of parts, each given the tensors of one prefix: the first of the next is drawn before a part ends."""

    def load_weights(self, weights):
        for _, part in itertools.groupby(weights, key=lambda item: item[0].startswith("layers")):
            super().load_weights(part)


class GroupedDrawing(Grouped, Drawing):
    pass


class Counted(Passing):
    """What it fills in is no copy of any tensor."""

    def fill(self, embedding):
        self.lm_head.weight.data.zero_()


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


def of(seed, kind):
    """A policy, the head first, and the blocks last of what every kind has."""
    weights = sorted(toys.checkpoint(seed), key=lambda item: (item[0] != HEAD, item[0].startswith("layers")))
    return weights + [("lm_head.bias", torch.ones(4))] * (kind is Whole)


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("kind", [Passing, Drawing, Whole, Counted, Grouped, GroupedDrawing])
@pytest.mark.parametrize("single", [True, False])
def test_a_head_that_a_later_call_would_overwrite_is_refused(atomic, opened, kind, single):
    engine = toys.Engine(kind(), of(0, kind) if opened else None, atomic=atomic)
    head, *others = of(1, kind)
    with pytest.raises(PatchError, match=f"wrote another tensor over {HEAD}"):
        takes(engine, [[head], *([[one] for one in others] if single else [others])])
    assert takes(engine, [of(2, kind)])


@pytest.mark.parametrize("first", [toys.checkpoint(0), toys.checkpoint(0, tied=True), None])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_comes_last_is_the_head_and_one_that_never_comes_the_embedding(atomic, first, tied):
    engine = toys.Engine(Passing(), first, atomic=atomic)
    for seed in (1, 2):
        *others, last = sorted(toys.checkpoint(seed, tied=tied), key=lambda item: item[0] == EMBEDDING)
        assert takes(engine, [[one] for one in (*others[:-1], last, *others[-1:])])


@pytest.mark.parametrize("kind", [Passing, Drawing])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_unnamed_update_waits_for_a_head_that_the_checkpoint_has(atomic, kind, size):
    """All but the head had come, a request or the call itself committed, and the embedding answered as the head."""
    engine = toys.Engine(kind(), toys.checkpoint(0), atomic=atomic)
    for seed in (1, 2):
        *others, last = toys.checkpoint(seed)
        for at in range(0, len(others), size):
            engine.load(others[at : at + size])
            engine.managed.after_call()
            engine.managed.before_request()
            assert not engine.managed.may_generate
        assert engine.managed.policy().missing == HEAD
        engine.load([last])
        engine.managed.before_request()
        assert engine.managed.may_generate and engine.managed.version == seed
        assert toys.same_answers(engine.model, toys.fresh("transposed", toys.checkpoint(seed)))


@pytest.mark.parametrize(("kind", "tied"), [(toys.Model, True), (toys.Model, False), (Drawing, False)])
@pytest.mark.parametrize("opened", [True, False])
def test_two_names_of_one_tensor_fill_nothing_in(atomic, kind, tied, opened):
    first = toys.checkpoint(0, tied=tied) if opened else None
    engine = toys.Engine(kind("transposed", tied=tied), first, atomic=atomic)
    for seed in (1, 2, 3):
        sent = dict(toys.checkpoint(seed, tied=True))
        sent[HEAD] = sent[EMBEDDING].clone() if tied else sent[EMBEDDING]
        engine.load(list(sent.items()))
        engine.managed.before_request()
        assert engine.managed.may_generate and engine.managed.version == seed
        assert toys.same_answers(engine.model, toys.fresh("transposed", list(sent.items()), tied))


def test_a_head_that_is_filled_from_a_tensor_in_use(atomic):
    """Under "model" that holds the old policy, and the new one answered with an old head."""
    engine = toys.Engine(Whole(), of(0, Whole), atomic=atomic)
    tied = [*toys.checkpoint(1, tied=True), ("lm_head.bias", torch.ones(4))]
    why = f"filled {HEAD} from a tensor in use, which holds the old policy"
    with pytest.raises(PatchError, match=why) if atomic == "model" else nullcontext():
        assert takes(engine, [tied])
