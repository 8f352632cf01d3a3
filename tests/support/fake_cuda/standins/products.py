"""Products of quantized matrices."""

import torch

from fake_cuda.standins import operator
from fake_cuda.standins.weight_layouts import unmarlin


@operator("_C::cutlass_scaled_mm")
def cutlass_scaled_mm(out, a, b, a_scales, b_scales, bias):
    """Multiply [m, k] by [k, n] with scales per tensor, row, column, or block. From capability 10.0 on int8 is refused, as there."""
    major = torch.cuda.get_device_capability()[0]
    if a.dtype is torch.int8 and major >= 10:
        raise RuntimeError(f"Int8 not supported on SM{10 * major}. Use FP8 quantization instead")
    result = _scaled(a, a_scales, *a.shape) @ _scaled(b, b_scales, *b.shape)
    out.copy_((result if bias is None else result + bias.float()).to(out.dtype))


def _scaled(values: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    scales = scales.float()
    if scales.numel() == 1:
        return values.float() * scales.reshape(())
    if scales.dim() == 2:
        down, across = -(-rows // scales.shape[0]), -(-columns // scales.shape[1])
        spread = scales.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]
        return values.float() * spread
    return values.float() * (scales.reshape(-1, 1) if scales.numel() == rows else scales.reshape(1, -1))


@operator("_C::marlin_gemm")
def marlin_gemm(a, c, packed, bias, scales, a_scales, global_scale, zeros, *arguments):
    """Multiply [m, k] by weights in Marlin's layout: unpack them, undo the permutation of their scales.

    Raises:
        RuntimeError: a lock in the workspace is not free; the real kernel would wait for ever, or sum what is not there."""
    # Before 0.33 the order of activations came here: two tensors, or none.
    if not isinstance(arguments[1], int):
        arguments = arguments[2:]
    workspace, type_id, m, n, k = arguments[:5]
    if workspace.any():
        raise RuntimeError("a lock of Marlin's workspace is not free")
    from vllm.model_executor.layers.quantization.utils.marlin_utils import get_scale_perms
    from vllm.scalar_type import scalar_types

    fp8 = type_id == scalar_types.float8_e4m3fn.id
    bits = 4 if type_id in (scalar_types.uint4b8.id, scalar_types.uint4.id) else 8
    integers = unmarlin(packed, k, n, bits)
    if fp8:
        weights = integers.to(torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        weights = integers.float() - (8 if bits == 4 else 128)
    grouped, single = get_scale_perms()
    perm = torch.tensor(grouped if scales.shape[0] > 1 else single, device=packed.device)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(len(perm), device=perm.device)
    plain = scales.float().reshape(-1, len(perm))[:, inverse].reshape(scales.shape[0], n)
    if fp8:  # the difference of the exponents' biases is folded into the scales, for bf16
        plain = plain * 2.0**-120
    result = a.float().reshape(m, k) @ (weights * plain.repeat_interleave(k // plain.shape[0], 0))
    return (result if bias is None else result + bias.float()).to(a.dtype)
