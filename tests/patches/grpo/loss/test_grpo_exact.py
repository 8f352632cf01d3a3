"""The loss: one gradient for every split, and what counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.loss.grpo_exact import AGGREGATIONS, Clip, Counts, count, grpo_loss

WIDTH = 9


def batch(samples: int, seed: int, empty: bool = True) -> dict[str, torch.Tensor]:
    """A batch in float64. Lengths differ; some samples have no output token, as padding or after
    rejection."""
    draw = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(samples, WIDTH, generator=draw, dtype=torch.float64) * scale

    logprobs = -normal(1).abs()
    lengths = torch.randint(0 if empty else 1, WIDTH + 1, (samples,), generator=draw)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + normal(0.3),
        "weights": normal(0.5).exp().clamp(max=1.5),
        "advantages": normal(1),
        "mask": (torch.arange(WIDTH) < lengths[:, None]).long(),
    }


def gradient(rows: dict[str, torch.Tensor], split: list[list[list[int]]], **how) -> torch.Tensor:
    """What data-parallel training accumulates: ``split`` has a list of micro-batches, as row numbers, per
    rank."""
    counts = count(rows["mask"])
    logprobs = rows["logprobs"].clone().requires_grad_()
    for rank in split:
        for micro in rank:
            part = {name: values[micro] for name, values in rows.items() if name != "logprobs"}
            mask, advantages = part.pop("mask"), part.pop("advantages")
            loss, _ = grpo_loss(logprobs[micro], advantages, mask, counts, world=len(split), **part, **how)
            # A data-parallel wrapper averages over ranks.
            (loss / len(split)).backward()
    return logprobs.grad


@settings(max_examples=60)
@given(data=st.data(), aggregation=st.sampled_from(AGGREGATIONS), seed=st.integers(0, 10_000))
def test_any_split_gives_the_gradient_of_the_whole_batch(data, aggregation, seed):
    samples = data.draw(st.integers(1, 12))
    rows = batch(samples, seed)
    how = dict(aggregation=aggregation, constant=7.0, clip=Clip(0.2, 0.28, 3.0))
    whole = gradient(rows, [[list(range(samples))]], **how)
    ranks = data.draw(st.integers(1, 4))
    order = data.draw(st.permutations(range(samples)))
    split: list[list[list[int]]] = [[] for _ in range(ranks)]
    while order:
        size = data.draw(st.integers(1, len(order)))
        split[data.draw(st.integers(0, ranks - 1))].append(list(order[:size]))
        order = order[size:]
    assert (gradient(rows, split, **how) - whole).abs().max() < 1e-10


def test_tokens_whose_ratio_is_clipped_are_counted():
    """Values and gradients of the terms: test_two_ranks.py."""
    rows = batch(5, 3, empty=False)
    new, old, gain, mask = (rows[name] for name in ("logprobs", "old_logprobs", "advantages", "mask"))
    ratio = (new - old).exp()
    _, sums = grpo_loss(new, gain, mask, count(mask), old_logprobs=old, clip=Clip(0.1, 0.2))
    outside = ((ratio > 1.2) & (gain > 0) | (ratio < 0.9) & (gain < 0)) & (mask > 0)
    assert sums["clipped"] == outside.sum() > 0


@pytest.mark.parametrize("bound", [1.0, 0.5])
def test_a_dual_bound_that_takes_the_gradient_of_unclipped_ratios_is_refused(bound):
    with pytest.raises(PatchError, match=f"dual is {bound}.*clip_ratio_c above 1"):
        Clip(dual=bound)


def test_what_lies_outside_the_mask_is_never_looked_at_and_no_output_gives_zero():
    rows = batch(4, 2)
    spoiled = {
        name: values if name == "mask" else values.masked_fill(rows["mask"] == 0, float("nan"))
        for name, values in rows.items()
    }
    how = dict(clip=Clip(dual=3.0))
    everything = [[list(range(4))]]
    assert torch.equal(gradient(spoiled, everything, **how), gradient(rows, everything, **how))
    rows = batch(3, 0)
    rows["mask"].zero_()
    assert not gradient(rows, [[[0, 1, 2]]], clip=Clip()).any()


def test_counts_of_padded_and_jagged_masks_agree():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    rows = [torch.tensor(row) for row in ([1, 1], [0, 0, 0], [1, 0, 1])]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    assert count(mask) == count(mask.bool()) == count(jagged) == Counts(samples=2, tokens=4)


@pytest.mark.parametrize(
    "change, named",
    [(dict(aggregation="mean"), "'mean'"), (dict(aggregation="seq-mean-token-sum-norm"), "constant")],
)
def test_bad_input_is_refused_by_name(change, named):
    zeros = torch.zeros(2, 3)
    given = dict(logprobs=zeros, advantages=torch.zeros(2), mask=zeros + 1, counts=Counts(2, 6))
    given |= dict(old_logprobs=zeros, clip=Clip())
    with pytest.raises(PatchError) as error:
        grpo_loss(**{**given, **change})
    assert named in str(error.value)
