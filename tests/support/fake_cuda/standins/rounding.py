"""Quantization of weights and activations to fp8, and of activations to int8."""

import torch

from fake_cuda.standins import operator

E4M3_MAX = 448.0


def to_fp8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return values / scale as float8_e4m3fn, clamped to its range."""
    return (values.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


@operator("_C::static_scaled_fp8_quant")
def static_scaled_fp8_quant(out, values, scale, group_shape=None):
    """Round with one scale, or one per row or column."""
    if scale.numel() > 1:
        scale = scale.reshape(-1, 1) if scale.numel() == values.shape[0] else scale.reshape(1, -1)
    out.copy_(to_fp8(values, scale))


@operator("_C::dynamic_scaled_fp8_quant")
def dynamic_scaled_fp8_quant(out, values, scale):
    """Round with the one scale that brings the largest value to 448."""
    scale.copy_((values.float().abs().amax() / E4M3_MAX).reshape(scale.shape))
    out.copy_(to_fp8(values, scale))


@operator("_C::dynamic_per_token_scaled_fp8_quant")
def dynamic_per_token_scaled_fp8_quant(out, values, scale, upper_bound):
    """Round with one scale per row."""
    largest = values.float().abs().amax(-1, keepdim=True)
    if upper_bound is not None:
        largest = torch.minimum(largest, upper_bound)
    scale.copy_((largest / E4M3_MAX).clamp(min=1 / (E4M3_MAX * 512)).reshape(scale.shape))
    out.copy_(to_fp8(values, scale.reshape(largest.shape)))


@operator("_C::dynamic_scaled_int8_quant")
def dynamic_scaled_int8_quant(out, values, scale, zero_points):
    """Round symmetrically with one scale per row."""
    assert zero_points is None
    largest = values.float().abs().amax(-1, keepdim=True)
    scale.copy_((largest / 127).reshape(scale.shape))
    out.copy_((values.float() * (127 / largest)).nan_to_num(0.0).round().to(torch.int8))


@operator("_C::per_token_group_fp8_quant")
def per_token_group_fp8_quant(values, out, scales, group, eps, low, high, ue8m0, *_):
    """Round with one scale per row and group of columns; with ``ue8m0`` scales are powers of two."""
    groups = values.float().reshape(-1, values.shape[-1] // group, group)
    scale = groups.abs().amax(-1).clamp(min=eps) / high
    if ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    out.copy_((groups / scale[..., None]).clamp(low, high).to(out.dtype).reshape(out.shape))
    scales.copy_(scale.reshape(scales.shape))
