"""Torch in place of the one op that vLLM's fp8 classes lack on a CPU: `vllm._custom_ops.scaled_fp8_quant`.

With it quantization="fp8" and "fp8_per_tensor" run. `scenario.Runner(standin=True)` puts plugin/ on
PYTHONPATH, whose entry point (vLLM's own door, group vllm.general_plugins) calls install() in every process
of the engine. With $FLASHPATCH_LAB_KERNELS the engine gets FlashPatch's own kernels for CPUs instead."""

import os
from typing import Any

KERNELS = "FLASHPATCH_LAB_KERNELS"

_LARGEST = 448.0  # of float8_e4m3fn
_SMALLEST_SCALE = 1.0 / (_LARGEST * 512.0)  # as in vLLM's CUDA kernels


def install() -> None:
    """Replace the function; callers look it up on the module at each call."""
    if os.environ.get(KERNELS):
        from flashpatch.patches.fp8.vllm import cpu_kernels

        cpu_kernels.use()
        return
    import vllm._custom_ops as ops

    ops.scaled_fp8_quant = scaled_fp8_quant


def scaled_fp8_quant(
    input: Any,
    scale: Any = None,
    num_token_padding: int | None = None,
    scale_ub: Any = None,
    use_per_token_if_dynamic: bool = False,
    output: Any = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Any, Any]:
    """(fp8 [M, N], scale): the scale is given, or found per tensor ([1]) or per token ([M, 1])."""
    import torch

    values = input.detach().float()
    if scale is None:
        peak = (
            values.abs().amax(-1, keepdim=True)
            if use_per_token_if_dynamic
            else values.abs().amax().reshape(1)
        )
        if scale_ub is not None:
            peak = peak.clamp(max=scale_ub)
        scale = (peak / _LARGEST).clamp(min=_SMALLEST_SCALE)
    inverse = 1.0 / _spread(scale.float(), values.shape, group_shape)
    quantized = (values * inverse).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    if output is None:
        rows = max(num_token_padding or 0, values.shape[0])
        output = torch.zeros((rows, values.shape[1]), dtype=torch.float8_e4m3fn)
    output[: values.shape[0]].copy_(quantized)
    return output, scale


def _spread(scale: Any, shape: Any, group: tuple[int, int] | None) -> Any:
    """`scale` so that it broadcasts over [M, N]."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.ndim == 1:  # (-1, 1) is per channel, (1, -1) per token
        return scale[None, :] if group is not None and group[0] == -1 else scale[:, None]
    return scale.repeat_interleave(shape[0] // scale.shape[0], 0).repeat_interleave(
        shape[1] // scale.shape[1], 1
    )
