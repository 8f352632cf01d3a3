"""vLLM's own rounding of weights to fp8 is done faster on a CPU, and to the same bits."""

from __future__ import annotations

import pytest
from installed import version_of
from packaging.version import Version

from flashpatch.patches.fp8.vllm_rounding import online_fp8

pytestmark = pytest.mark.vllm
if version_of("vllm") < Version("0.31"):
    pytest.skip("vLLM rounds otherwise before 0.31", allow_module_level=True)

SHAPES = [(2, 8), (300, 1031), (2049, 512)]


def weight(shape: tuple[int, ...], dtype: str):
    import torch

    w = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.08).to(getattr(torch, dtype))
    w[0] = 0
    w[-1, :2] = torch.tensor([-3.0, 0.0])
    return w


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_scales_are_those_of_vllm(shape, dtype):
    import torch
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.utils import quant_utils

    for w in (weight(shape, dtype), weight(shape[::-1], dtype).t()):
        asked = dict(dim=-1, keepdim=True)
        amax = quant_utils.weight_amax(w, **asked)
        assert torch.equal(online_fp8.on_weight_amax(quant_utils.weight_amax, w, **asked), amax)
        scale = fp8._fp8_channel_scale(amax)
        codes = online_fp8.on_fp8_quant_per_channel(fp8._fp8_quant_per_channel, w, scale)
        stock = fp8._fp8_quant_per_channel(w, scale)
        assert torch.equal(codes.view(torch.uint8), stock.view(torch.uint8))
        assert codes.stride() == stock.stride()


def test_experts_and_whole_tensors_have_the_shapes_of_vllm():
    import torch
    from vllm.model_executor.layers.quantization.utils.quant_utils import weight_amax

    w = weight((6, 40), "bfloat16").view(3, 2, 40)
    for asked in ({}, dict(dim=-1), dict(dim=-1, keepdim=True), dict(dim=1)):
        assert torch.equal(online_fp8.on_weight_amax(weight_amax, w, **asked), weight_amax(w, **asked))
