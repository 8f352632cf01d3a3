"""vLLM's fp8 quantization of a matrix works on CPUs, where its operator has no kernel."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    import torch


@functools.cache
def has_cpu_kernel() -> bool:
    """Whether vLLM's extension has the operator for CPUs."""
    import torch

    return torch._C._dispatch_has_kernel_for_dispatch_key("_C::static_scaled_fp8_quant", "CPU")


def on_scaled_fp8_quant(original: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Around ``scaled_fp8_quant``: torch's arithmetic if there is no kernel."""
    if not input.is_cpu or has_cpu_kernel():
        return original(input, *args, **kwargs)
    from flashpatch.patches.fp8.precision.scaled_quant import scaled_fp8_quant

    return scaled_fp8_quant(input, *args, **kwargs)


PATCH = Patch(
    id="fp8.vllm.scaled_fp8_quant",
    targets=("vllm._custom_ops:scaled_fp8_quant",),
    requires="vllm>=0.24",
    wrapper=on_scaled_fp8_quant,
    contract=Contract(
        params=(
            "input",
            "scale",
            "num_token_padding",
            "scale_ub",
            "use_per_token_if_dynamic",
            "output",
            "group_shape",
        ),
    ),
    evidence="optional",
    scope=frozenset({"worker"}),
    why="On a CPU, fp8 with one scale per tensor ends while weights are loaded: the operator that rounds them "
    "exists for GPUs only.",
    how="Quantizes tensors on a CPU in torch, if vLLM has no kernel for it.",
    remove_when="vLLM's static_scaled_fp8_quant has a kernel for CPUs.",
)
