"""Multiply fp8 matrices on a CPU: weights are decoded a block at a time into a buffer that is reused.

Products of two e4m3 values are exact in float32, and so are the values themselves in bfloat16. What is left
to choose is the matrix product that torch does fast: bfloat16 if the CPU has instructions for it and there
are rows enough, which rounds each sum to bfloat16 once more; float32 elsewhere."""

from __future__ import annotations

import functools
import threading

import torch

from flashpatch.patches.fp8.precision.e4m3 import decode
from flashpatch.patches.fp8.precision.quantize import rows_at_once

FEW_ROWS = 4  # up to so many, decoding costs more than the product itself, and float32 saves a conversion
FEW_CODES = 4096  # up to so many, torch's own cast is faster than the steps of a decoding


class _Buffers(threading.local):
    """One flat buffer per dtype and thread, as large as the largest block so far."""

    def __init__(self) -> None:
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def get(self, dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
        """``[rows, columns]`` of the buffer, uninitialized, valid until the next call in this thread."""
        flat = self._flat.get(dtype)
        if flat is None or flat.numel() < rows * columns:
            with torch.inference_mode(False):  # usable inside and outside of inference mode
                flat = self._flat[dtype] = torch.empty(rows * columns, dtype=dtype)
        return flat[: rows * columns].view(rows, columns)

    def bytes(self) -> int:
        """Size of this thread's buffers."""
        return sum(flat.nbytes for flat in self._flat.values())


buffers = _Buffers()


@functools.cache
def has_bf16_products() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``(a * a_scale) @ (b * b_scale) + bias`` for fp8 ``a`` and ``b``.

    Sums are float32, scales and bias are applied in float32, and the result is rounded to ``out_dtype``.
    Where the product is done in bfloat16, sums are rounded to bfloat16 before the scales. Which of the two is
    chosen depends on the CPU, the number of rows and ``out_dtype`` only, so a product is deterministic.

    Args:
        a: float8_e4m3fn [m, k].
        b: float8_e4m3fn [k, n] without NaN, best as the transpose of a contiguous matrix.
        a_scale: float32, one element or [m, 1].
        b_scale: float32, one element or n of them.
        bias: [n].
        out_dtype: dtype of the result.

    Returns:
        [m, n]."""
    m, n = a.shape[0], b.shape[1]
    wide = a.float() if a.numel() <= FEW_CODES else decode(a, torch.empty(a.shape, dtype=torch.float32))
    dtype = torch.float32
    if out_dtype is torch.bfloat16 and m > FEW_ROWS and has_bf16_products():
        wide, dtype = wide.bfloat16(), torch.bfloat16
    step = rows_at_once(b.t())  # output channels that are decoded at once
    if n <= step:
        out = torch.nn.functional.linear(wide, _decoded(b.t(), dtype)).float()
    else:
        out = torch.empty(m, n, dtype=torch.float32)
        for start in range(0, n, step):
            block = slice(start, start + step)
            out[:, block] = torch.nn.functional.linear(wide, _decoded(b.t()[block], dtype))
    out.mul_(a_scale.reshape(-1, 1)).mul_(b_scale.reshape(1, -1))
    if bias is not None:
        out.add_(bias)
    return out.to(out_dtype)


def _decoded(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of weights [rows, k] in this thread's buffer, valid until the next call."""
    block = decode(codes, buffers.get(torch.float32, *codes.shape), nan=False)
    return block if dtype is torch.float32 else buffers.get(dtype, *codes.shape).copy_(block)
