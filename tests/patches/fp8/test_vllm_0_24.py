"""The head in float32 before vLLM 0.26, with each device's way to multiply."""

from types import SimpleNamespace

import pytest
import torch

from flashpatch.patches.fp8 import vllm_0_24


class Linear:
    quant_method = type("UnquantizedLinearMethod", (), {})()

    def __init__(self, dtype):
        self.weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("bias", [None, torch.ones(7, dtype=torch.bfloat16)])
def test_on_cuda_no_float32_copy_of_the_head_is_made(bias, monkeypatch):
    hidden = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    head, asked, real = Linear(torch.bfloat16), [], torch.mm

    def mm(there, weight, out_dtype):  # torch has it for CUDA alone
        asked.append((weight.dtype, out_dtype))
        return real(there.tensor.to(out_dtype), weight.to(out_dtype))

    monkeypatch.setattr(torch, "mm", mm)
    ours = vllm_0_24._Float32Head(head)
    on_a_cpu = ours.apply(ours, hidden, bias)
    on_cuda = ours.apply(ours, SimpleNamespace(is_cuda=True, tensor=hidden), bias)
    assert asked == [(torch.bfloat16, torch.float32)]
    assert torch.allclose(on_cuda, on_a_cpu, rtol=1e-6) and on_cuda.dtype == torch.float32
