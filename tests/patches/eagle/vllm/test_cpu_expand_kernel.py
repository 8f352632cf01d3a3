"""Values per request, spread over draft tokens."""

import pytest
import torch

from flashpatch.patches.eagle.vllm import cpu_kernels
from flashpatch.patches.eagle.vllm.cpu_kernels import expand, recover


def _stock(output, input_val, cu_num_tokens, replace_from, replace_to, **kwargs):
    output.fill_(-1)  # int64 is what the kernel takes as it is


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_values_reach_the_output(dtype):
    output = torch.full((6,), 77, dtype=dtype)
    counts, ends = torch.tensor([2, 0, 5], dtype=dtype), torch.tensor([2, 5, 6], dtype=torch.int32)
    expand(_stock, output, counts, ends, 0, 1, MAX_NUM_TOKENS=32)
    assert output.tolist() == [2, 2, 1, 1, 1, 5]


def test_requests_without_drafts_get_nothing_and_what_the_kernel_can_do_is_left_to_it():
    output = torch.full((2,), 77.0)
    expand(_stock, output, torch.tensor([0.5, 0.7, 0.9]), torch.tensor([0, 2, 2]), 0, 1)
    assert output.tolist() == pytest.approx([0.7, 0.7])
    output = torch.zeros(1, dtype=torch.int64)
    expand(_stock, output, torch.ones(1, dtype=torch.int64), torch.ones(1), 0, 1)
    assert output.tolist() == [-1]


def test_an_argument_that_the_stand_in_does_not_take_is_left_out():
    took = {}

    def newer(inv_q, USE_FP64_GUMBEL=False):
        took["newer"] = USE_FP64_GUMBEL

    def of_0_24(inv_q, NO_DRAFT_PROBS=False):
        took["0.24"] = NO_DRAFT_PROBS

    recover(newer, None, USE_FP64_GUMBEL=True)
    recover(of_0_24, None, NO_DRAFT_PROBS=True, USE_FP64_GUMBEL=True)
    assert took == {"newer": True, "0.24": True}


@pytest.mark.vllm
def test_the_kernels_that_vllm_calls_are_the_corrected_ones():
    """Stock's own object keeps the function before vLLM 0.31; afterwards it is found in the module."""
    import flashpatch

    stand_ins = pytest.importorskip("vllm.utils.cpu_triton_utils")
    names = [patch.targets[0].partition(":")[2] for patch in cpu_kernels.patches]
    kernels = [getattr(stand_ins, name.strip("_").removesuffix("_impl"), None) for name in names]
    before = [getattr(kernel, "func", None) for kernel in kernels]
    flashpatch.enable("eagle")
    try:
        held = [getattr(stand_ins, name) for name in names]
        assert [getattr(kernel, "func", one) for kernel, one in zip(kernels, held)] == held
        assert all(one is not old for one, old in zip(held, before))
    finally:
        flashpatch.disable("eagle")
    assert [getattr(kernel, "func", None) for kernel in kernels] == before
