"""Quantize to fp8 in torch, with the arguments of vLLM's ``scaled_fp8_quant``."""

from __future__ import annotations

import torch

from flashpatch.patches.fp8.precision.e4m3 import LARGEST

SMALLEST_SCALE = 1.0 / (LARGEST * 512.0)
_BLOCK = 1 << 20  # values that are in float32 at once


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix to float8_e4m3fn.

    A given scale, and one found for the whole tensor, multiply by their reciprocal; scales per token divide.
    So do vLLM's kernels.

    Args:
        input: [m, n], any floating dtype.
        scale: one element, or [m] or [n] as ``group_shape`` says, or one per group [m / rows, n / columns];
            None to find it.
        num_token_padding: least number of rows of the result; those added are zero.
        scale_ub: upper bound of the largest absolute value of a token, if scales are found.
        use_per_token_if_dynamic: find a scale per row [m, 1], not one [1].
        output: where to write, float8_e4m3fn.
        group_shape: (-1, 1) for a scale per column, (1, -1) per row, of a one-dimensional ``scale``.

    Returns:
        The codes [m or more, n] and the scale, float32."""
    rows, columns = input.shape
    per_token = scale is None and use_per_token_if_dynamic
    if scale is None:
        scale = _found(input, per_token, scale_ub)
    if output is None:
        output = torch.zeros(max(num_token_padding or 0, rows), columns, dtype=torch.float8_e4m3fn)
    spread = _spread(scale.float(), rows, columns, group_shape)
    step = max(1, _BLOCK // max(1, columns))
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        part = spread[block] if spread.shape[0] > 1 else spread
        values = input[block].float()
        values = values / part if per_token else values * part.reciprocal()
        output[block] = values.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return output, scale


def _found(input: torch.Tensor, per_token: bool, upper: torch.Tensor | None) -> torch.Tensor:
    amax = input.abs().amax(-1, keepdim=True) if per_token else input.abs().amax().reshape(1)
    amax = amax.float() if upper is None else amax.float().clamp(max=upper)
    return (amax / LARGEST).clamp(min=SMALLEST_SCALE)


def _spread(scale: torch.Tensor, rows: int, columns: int, group: tuple[int, int] | None) -> torch.Tensor:
    """``scale`` as a matrix that broadcasts over [rows, columns]."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1:
        return scale[None, :] if group is not None and group[0] == -1 else scale[:, None]
    return scale.repeat_interleave(rows // scale.shape[0], 0).repeat_interleave(columns // scale.shape[1], 1)
