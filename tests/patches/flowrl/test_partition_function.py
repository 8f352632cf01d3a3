"""log Z from hidden states, without verl: which tokens count, and that nothing but the last layer is kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flashpatch.errors import PatchError
from flashpatch.patches.flowrl.partition_function import Capture, PartitionFunction, Prompts
from flashpatch.verify.probes.flowrl import paper
from flashpatch.verify.probes.verl_actor import untrained


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=5), st.integers(0, 3))
def test_packed_and_padded_rows_give_the_same_means(sizes, extra):
    hidden = [torch.randn(prompt + answer, 4) for prompt, answer in sizes]
    wanted = torch.stack([rows[:prompt].mean(0) for rows, (prompt, _) in zip(hidden, sizes, strict=True)])
    lengths = torch.tensor([prompt for prompt, _ in sizes])
    ends = torch.tensor([len(rows) for rows in hidden]).cumsum(0)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]])
    packed = torch.cat([*hidden, torch.full((extra, 4), 7.0)]).unsqueeze(0)
    longest = max(map(len, hidden)) + extra
    rows = torch.stack([torch.cat([h, torch.full((longest - len(h), 4), 7.0)]) for h in hidden])
    assert torch.allclose(Prompts(lengths, starts).mean(packed), wanted, atol=1e-6)
    assert torch.allclose(Prompts(lengths, None).mean(rows), wanted, atol=1e-6)


@pytest.mark.parametrize("starts", [torch.tensor([0]), None])
def test_a_long_prompt_has_a_mean_in_half_precision(starts):
    hidden = torch.randn(1, 2058, 4).half()
    hidden[..., 3] = 60.0  # its sum is beyond 65504
    found = Prompts(torch.tensor([2048]), starts).mean(hidden)
    assert torch.allclose(found, hidden[:, :2048].float().mean(1), atol=1e-3), found


def test_rows_that_are_not_the_micro_batchs_are_refused():
    with pytest.raises(PatchError, match="hidden states of 3 rows where 2 were expected"):
        Prompts(torch.tensor([1, 1]), None).mean(torch.zeros(3, 4, 8))


@pytest.mark.parametrize("layers", [1, 3])
def test_it_is_the_papers_network(layers):
    torch.manual_seed(0)
    head = PartitionFunction(8, layers, 0.5).double().eval()
    x = torch.randn(2, 8, dtype=torch.float64)
    linear = [part for part in head.net if isinstance(part, nn.Linear)]
    wanted = [paper.partition(row, [(part.weight, part.bias) for part in linear]) for row in x]
    assert head(x).tolist() == pytest.approx(wanted, rel=1e-9)


def tiny() -> nn.Module:
    model = untrained(hidden_size=8, num_hidden_layers=3, attn_implementation="eager")
    model.add_module("proj_z", PartitionFunction(8, 2, 0.0))
    return model


def test_one_forward_pass_and_only_its_last_layer():
    model = tiny()
    capture = Capture(model, detach=False)
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    ids = torch.arange(10).reshape(2, 5)
    capture.prompts = Prompts(torch.tensor([2, 3]), None)
    output = model(ids, use_cache=False)
    assert len(calls) == 1 and output.hidden_states is None and capture._hidden is None
    whole = model.model(ids).last_hidden_state
    means = torch.stack([whole[0, :2].mean(0), whole[1, :3].mean(0)])
    assert torch.allclose(output.loss, model.proj_z(means), atol=1e-6)
    assert model(ids).loss is None  # a pass that nobody announced


def test_no_log_z_without_gradient():
    model = tiny()
    capture = Capture(model, detach=False)
    with torch.no_grad():
        capture.prompts = Prompts(torch.tensor([2]), None)
        assert model(torch.arange(4).reshape(1, 4)).loss is None and capture._hidden is None


def test_a_module_without_backbone_is_refused():
    with pytest.raises(PatchError, match="cannot find the backbone of Linear"):
        Capture(nn.Linear(2, 2), detach=False)
