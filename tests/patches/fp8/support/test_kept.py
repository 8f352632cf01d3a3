"""Which tokens were kept, how they travel with a log-probability, and the value and gradient of what is made of them."""

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch

from flashpatch.patches.fp8.support.kept import NO_SET, TOO_MANY, Drawn, kept_ids, renormalized, table

WIDTH = 4


def position(logs: dict[int, float]) -> dict[int, SimpleNamespace]:
    return {id: SimpleNamespace(logprob=value) for id, value in logs.items()}


def of_weights(weights: dict[int, float], *more: int) -> dict[int, SimpleNamespace]:
    whole = sum(weights.values())
    return position(
        {**{id: math.log(w / whole) for id, w in weights.items()}, **dict.fromkeys(more, -math.inf)}
    )


def test_finite_log_probabilities_are_those_of_kept_tokens_or_too_many():
    assert kept_ids(of_weights({7: 1, 3: 5, 9: 2}, 4, 5), WIDTH).tolist() == [7, 3, 9]
    # As many as are carried.
    assert kept_ids(of_weights({7: 1, 3: 5, 9: 2, 2: 1}), WIDTH).tolist() == [7, 3, 9, 2]
    five = of_weights({7: 1, 3: 5, 9: 2, 2: 1, 8: 1})
    assert kept_ids(five, WIDTH).tolist() == [TOO_MANY]
    del five[8]  # the sum of what is left is not 1
    assert kept_ids(five, WIDTH).tolist() == [TOO_MANY]


def test_ids_travel_with_their_log_probability():
    drawn = Drawn(-0.5, kept_ids(of_weights({7: 1, 3: 5}, 1), WIDTH))
    for one in (drawn, pickle.loads(pickle.dumps(drawn)), copy.deepcopy([drawn])[0]):
        assert one == -0.5 and one.kept.tolist() == [7, 3]
    rows = table([drawn, 0.0], WIDTH)
    assert rows.tolist() == [[7, 3, NO_SET, NO_SET], [NO_SET] * WIDTH] and rows.dtype == "int32"


@pytest.fixture
def case():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 11, generator=draw, dtype=torch.float64) * 3
    counts = [4, 1, 2, 0, 3, 4]
    ids = torch.full((6, WIDTH), NO_SET, dtype=torch.int32)
    for row, count in enumerate(counts):
        ids[row, :count] = torch.randperm(11, generator=draw)[:count].int()
    labels = torch.tensor(
        [int(ids[row, max(count - 1, 0)]) if count else 5 for row, count in enumerate(counts)]
    )
    return logits, labels, ids


def masked(logits, labels, ids):
    """By definition: a softmax after every other logit was made minus infinity."""
    found = []
    for row, label, kept in zip(logits, labels, ids, strict=True):
        kept = kept[kept >= 0].long()
        if not len(kept):
            found.append(row.sum() * 0)
            continue
        only = torch.full_like(row, -math.inf).index_put((kept,), row[kept])
        found.append(only.log_softmax(-1)[label])
    return torch.stack(found)


def test_value_and_gradient_are_those_of_a_softmax_over_the_kept_tokens(case):
    logits, labels, ids = case
    weights = torch.linspace(-1, 2, len(labels), dtype=torch.float64)
    results = []
    for function in (renormalized, masked):
        leaf = logits.clone().requires_grad_()
        values = function(leaf, labels, ids)
        (gradient,) = torch.autograd.grad((values * weights).sum(), leaf)
        results.append((values.detach(), gradient))
    (got, slope), (wanted, true) = results
    assert got.dtype == torch.float64 and (got - wanted).abs().max() < 1e-12
    assert (slope - true).abs().max() < 1e-12 and true.abs().max() > 0.1
    assert not slope[3].any() and got[3] == 0 and got[1] == 0  # no set; a set of one
    assert torch.autograd.gradcheck(lambda x: renormalized(x, labels, ids), logits.clone().requires_grad_())


def test_half_precision_is_summed_in_float32(case):
    logits, labels, ids = case
    half = logits.bfloat16()
    got = renormalized(half, labels, ids)
    assert got.dtype == torch.float32
    assert (got - renormalized(half.double(), labels, ids)).abs().max() < 1e-6
