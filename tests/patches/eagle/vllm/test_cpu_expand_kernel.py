"""Values per request, spread over draft tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from flashpatch.patches.eagle.vllm.cpu_expand_kernel import on_expand


def _stock(output, input_val, cu_num_tokens, replace_from, replace_to, **kwargs):
    output.fill_(-1)  # int64 is what the kernel takes as it is


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_values_reach_the_output(dtype):
    output = torch.full((6,), 77, dtype=dtype)
    on_expand(
        _stock,
        output,
        torch.tensor([2, 0, 5], dtype=dtype),
        torch.tensor([2, 5, 6], dtype=torch.int32),
        0,
        1,
        MAX_NUM_TOKENS=32,
    )
    assert output.tolist() == [2, 2, 1, 1, 1, 5]


def test_requests_without_drafts_get_nothing():
    output = torch.full((2,), 77.0)
    on_expand(_stock, output, torch.tensor([0.5, 0.7, 0.9]), torch.tensor([0, 2, 2]), 0, 1)
    assert output.tolist() == pytest.approx([0.7, 0.7])


def test_what_the_kernel_can_do_is_left_to_it():
    output = torch.zeros(1, dtype=torch.int64)
    on_expand(_stock, output, torch.ones(1, dtype=torch.int64), torch.ones(1), 0, 1)
    assert output.tolist() == [-1]
