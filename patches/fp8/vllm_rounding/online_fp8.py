"""vLLM's online fp8 rounding of weights, several times faster on a CPU, to the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    import torch


def on_weight_amax(original: Any, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Around ``weight_amax``: on a CPU, find the largest magnitude of each row by comparing bits."""
    if not weight.is_cpu or kwargs.get("dim") != -1:
        return original(weight, **kwargs)
    from flashpatch.patches.fp8.precision.quantize import row_amax

    amax = row_amax(weight)
    return amax if kwargs.get("keepdim") else amax.squeeze(-1)


def on_fp8_quant_per_channel(original: Any, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Around ``_fp8_quant_per_channel``: on a CPU, hand it as many rows at a time as stay in the cache in float32."""
    if not weight.is_cpu:
        return original(weight, scale)
    import torch

    from flashpatch.patches.fp8.precision.quantize import rows_at_once

    rows, codes = rows_at_once(weight), torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for block, part, own in zip(codes.split(rows), weight.split(rows), scale.split(rows), strict=True):
        block.copy_(original(part, own))
    return codes


AMAX = Patch(
    id="fp8.vllm_rounding.weight_amax",
    targets=("vllm.model_executor.layers.quantization.utils.quant_utils:weight_amax",),
    requires="vllm>=0.31",
    wrapper=on_weight_amax,
    contract=Contract(params=("weight", "dim", "keepdim")),
    evidence="optional",
    scope=frozenset({"worker"}),
    why="On a CPU, the largest magnitudes of a bf16 weight's rows take torch ten times as long as a copy of the weight.",
    how="Compares bits instead, whose order is that of magnitudes.",
    remove_when="torch.aminmax over rows of bf16 is as fast as reading them.",
)
QUANT = Patch(
    id="fp8.vllm_rounding.fp8_quant_per_channel",
    targets=("vllm.model_executor.layers.quantization.online.fp8:_fp8_quant_per_channel",),
    requires="vllm>=0.31",
    wrapper=on_fp8_quant_per_channel,
    contract=Contract(params=("weight", "scale")),
    evidence="optional",
    scope=frozenset({"worker"}),
    why="On a CPU, a weight is rounded to fp8 through float32 values of all of it, three times as slowly as in the cache.",
    how="Calls the original with some rows at a time.",
    remove_when="vLLM rounds in blocks that fit a cache.",
)
