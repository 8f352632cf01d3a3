"""What SGLang calls and no device of ours has: kernels that it compiles at run time, and two of its own products in fp8."""

import torch

from fake_cuda.standins import products
from fake_cuda.standins.rounding import (
    E4M3_MAX,
    dynamic_per_token_scaled_fp8_quant,
    per_token_group_fp8_quant,
    to_fp8,
)


def gptq_marlin_repack(b_q_weight, perm, size_k, size_n, num_bits) -> torch.Tensor:
    """Return a bijection of the bytes in the shape of Marlin's layout: enough to see whether an update packs anew."""
    return b_q_weight.flip(0, 1).reshape(size_k // 16, size_n * 16 * num_bits // 32).contiguous()


def per_tensor_quant_fp8(values, out, scale, is_static=False) -> None:
    """Round with one scale: the given one, or that which brings the largest value to 448."""
    if not is_static:
        scale.copy_((values.float().abs().amax() / E4M3_MAX).reshape(scale.shape))
    out.copy_(to_fp8(values, scale))


def per_token_group_quant_8bit(
    input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0=False, *_, **__
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round with one scale per row and group of columns."""
    per_token_group_fp8_quant(input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0)
    return output_q, output_s


def fp8_scaled_mm(a, b, a_scales, b_scales, out_dtype, bias=None) -> torch.Tensor:
    out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    products.cutlass_scaled_mm(out, a, b, a_scales.reshape(-1), b_scales.reshape(-1), bias)
    return out


def sgl_per_token_quant_fp8(values, out, scale) -> None:
    dynamic_per_token_scaled_fp8_quant(out, values, scale, None)


def clamp_position_cuda(lengths) -> torch.Tensor:
    return (lengths - 1).clamp(min=0).long()


sgl_per_token_group_quant_8bit = per_token_group_quant_8bit
