"""Log-probabilities from hidden states: the same numbers and gradients as through all logits, in less
memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.loss.logprobs import token_logprobs


def case(tokens: int, hidden: int, vocabulary: int, dtype=torch.float64, seed: int = 0):
    """Hidden states, head and labels; about a quarter of the labels is -100."""
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, hidden, generator=draw, dtype=torch.float64)
    head = torch.randn(vocabulary, hidden, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (tokens,), generator=draw)
    labels[torch.rand(tokens, generator=draw) < 0.25] = -100
    return states.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(), labels


def through_logits(states, head, labels, temperature=1.0):
    """The plain way, in the inputs' dtype: logprobs and entropy."""
    logs = torch.log_softmax((states @ head.t()) / temperature, -1)
    kept = labels != -100
    picked = logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    entropy = -(logs.exp() * logs).sum(-1)
    return picked * kept, entropy * kept


@settings(max_examples=40)
@given(
    many=st.booleans(),
    tokens=st.integers(1, 20),
    vocabulary=st.integers(1, 30),
    block=st.tuples(st.integers(1, 25), st.integers(1, 35)),
    temperature=st.floats(0.2, 5),
    seed=st.integers(0, 1000),
)
def test_any_blocks_give_the_numbers_of_all_logits(many, tokens, vocabulary, block, temperature, seed):
    states, head, labels = case(tokens, 6, vocabulary, seed=seed)
    scale = (
        torch.linspace(0.5, temperature, tokens, dtype=torch.float64) if many else torch.tensor(temperature)
    )
    given = dict(temperature=scale, entropy=True, tokens=block[0], vocabulary=block[1])
    found = token_logprobs(states, head, labels, **given)
    logprobs, entropy = through_logits(states, head, labels, scale[:, None] if many else scale)
    torch.testing.assert_close(found.logprobs, logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.entropy, entropy, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, tokens, dtype=torch.float64)
    mine = torch.autograd.grad((found.logprobs * weights + found.entropy).sum(), (states, head))
    theirs = torch.autograd.grad((logprobs * weights + entropy).sum(), (states, head))
    torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_bf16_is_summed_in_float32():
    states, head, labels = case(64, 32, 3000, torch.bfloat16)
    exact = through_logits(states.double(), head.double(), labels)[0]
    found = token_logprobs(states, head, labels).logprobs
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 1e-4
    narrow = through_logits(states, head, labels)[0]
    assert (narrow - exact).abs().max() > 1e-2, "bf16 logits are no worse: the test shows nothing"
    (mine,) = torch.autograd.grad(found.sum(), head)
    (wanted,) = torch.autograd.grad(exact.sum(), head)
    # Rounded once: half a unit in the last of bf16's eight bits.
    assert ((mine.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-4).all()


def test_autocast_does_not_narrow_it():
    states, head, labels = case(16, 8, 100, torch.float32)
    plain = token_logprobs(states, head, labels).logprobs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = token_logprobs(states, head, labels).logprobs
    assert torch.equal(plain, inside)


def test_shapes_follow_the_labels_and_nothing_may_be_wanted():
    states, head, labels = case(12, 4, 9, torch.float32)
    flat = token_logprobs(states, head, labels, entropy=True)
    deep = token_logprobs(states.view(3, 4, 4), head, labels.view(3, 4), entropy=True)
    assert torch.equal(flat.logprobs.view(3, 4), deep.logprobs) and deep.entropy.shape == (3, 4)
    nothing = token_logprobs(states, head, torch.full((12,), -100))
    assert torch.equal(nothing.logprobs, torch.zeros(12))
    nothing.logprobs.sum().backward()
    assert not states.grad.any() and not head.grad.any()


def test_all_logits_never_exist(monkeypatch):
    """The largest tensor made, forward and backward, is a block or as large as an input."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            Largest.seen = max([Largest.seen, *sizes])
            return result

    states, head, labels = case(400, 8, 5000, torch.float32)
    with Largest():
        found = token_logprobs(states, head, labels, entropy=True, tokens=50, vocabulary=500)
        (found.logprobs.sum() + found.entropy.sum()).backward()
    assert Largest.seen <= max(head.numel(), 50 * 500) < 400 * 5000 / 40


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(labels=torch.tensor([0, 9, 1])), "label 9 is outside of a vocabulary of 9"),
        (dict(labels=torch.tensor([0, -1, 1])), "label -1"),
        (dict(labels=torch.tensor([0])), "labels have the shape (1,)"),
        (dict(temperature=0.0), "temperature is 0.0"),
        (dict(temperature=torch.tensor([1.0, -1.0, 1.0])), "not positive everywhere"),
    ],
)
def test_bad_input_is_refused_by_name(change, named):
    given = dict(hidden=torch.zeros(3, 4), head=torch.zeros(9, 4), labels=torch.tensor([0, 1, 2]))
    with pytest.raises(PatchError) as error:
        token_logprobs(**{**given, **change})
    assert named in str(error.value)
