"""Give vLLM on a CPU the kernels that it lacks, or has wrong; on CUDA keep it from one that refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flashpatch.arming.site import Site
from flashpatch.decorate import Patches

if TYPE_CHECKING:
    import torch


LINEAR = "vllm.model_executor.kernels.linear"

patches = Patches("fp8", "vllm>=0.24", scope="worker")


@patches.register(
    f"{LINEAR}:_POSSIBLE_FP8_KERNELS",
    relies_on=(
        f"{LINEAR}:init_fp8_linear_kernel",
        f"{LINEAR}.scaled_mm.ScaledMMLinearKernel:FP8ScaledMMLinearKernel.apply_scaled_mm",
        f"{LINEAR}.scaled_mm.ScaledMMLinearKernel:FP8ScaledMMLinearKernel.process_weights_after_loading",
        f"{LINEAR}.scaled_mm.ScaledMMLinearKernel:FP8ScaledMMLinearLayerConfig.weight_quant_key",
        "vllm.platforms.interface:PlatformEnum",
    ),
    evidence="install",
    why="torch's fp8 product is slow on CPUs, by a factor of ten, or of thousands if oneDNN takes its "
    "reference kernel (CPUs with AMX); vLLM's own AMX kernel for one scale per tensor fails.",
    remove_when="vLLM's fp8 kernels are exact and fast on CPUs with and without AMX.",
)
def possible_fp8_kernels(site: Site) -> Callable[[], None]:
    """Put a kernel for CPUs before vLLM's: weights stay in fp8 and are decoded exactly, by integer shifts, into a buffer
    that all layers share. vLLM's register_linear_kernel would put it last."""
    from vllm.platforms.interface import PlatformEnum

    from flashpatch.patches.fp8.vllm.cpu_kernel import FlashPatchCPUFP8LinearKernel

    kernels = site.original[PlatformEnum.CPU]
    _put_first(site.original)

    def take_out() -> None:
        if FlashPatchCPUFP8LinearKernel in kernels:  # layers that chose the kernel keep it
            kernels.remove(FlashPatchCPUFP8LinearKernel)

    return take_out


def _put_first(possible: Mapping[Any, list[type]]) -> None:
    """Put the kernel before vLLM's own in ``possible``, platform to kernels, best first. At most once."""
    from vllm.platforms.interface import PlatformEnum

    from flashpatch.patches.fp8.vllm.cpu_kernel import FlashPatchCPUFP8LinearKernel

    if FlashPatchCPUFP8LinearKernel not in possible[PlatformEnum.CPU]:
        possible[PlatformEnum.CPU].insert(0, FlashPatchCPUFP8LinearKernel)


@functools.cache
def _has_cpu_kernel() -> bool:
    import torch

    return torch._C._dispatch_has_kernel_for_dispatch_key("_C::static_scaled_fp8_quant", "CPU")


def native_quant(site: Site) -> str | None:
    """Name vLLM's operator unless it lacks the kernel here. On a GPU compiled forwards reach it, where no call can be counted."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() and not _has_cpu_kernel() else "vLLM's operator"


@patches.wrap(
    "vllm._custom_ops:scaled_fp8_quant",
    params=(
        "input",
        "scale",
        "num_token_padding",
        "scale_ub",
        "use_per_token_if_dynamic",
        "output",
        "group_shape",
    ),
    native=native_quant,
    evidence="optional",
    why="On a CPU, fp8 with one scale per tensor ends while weights are loaded: the operator that rounds them exists "
    "for GPUs only.",
    remove_when="vLLM's static_scaled_fp8_quant has a kernel for CPUs.",
)
def scaled_fp8_quant(original: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Quantize tensors on a CPU in torch, if vLLM has no kernel for it."""
    if not input.is_cpu:
        return original(input, *args, **kwargs)
    from flashpatch.patches.fp8.precision import scaled_quant

    return scaled_quant.scaled_fp8_quant(input, *args, **kwargs)


@patches.wrap(
    f"{LINEAR}.scaled_mm.cpu:CPUInt8ScaledMMLinearKernel._apply_weights_sgl",
    relies_on="int8_scaled_mm_with_quant",
    evidence="optional",
    why="On CPUs with AMX, int8 models whose linear layers get three-dimensional inputs (GPT-NeoX, OLMo2) end in 'mat1 "
    "must be a 2D tensor'.",
    remove_when="vLLM's kernel flattens its input itself.",
)
def apply_weights_sgl(
    original: Any, self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Flatten the leading dimensions of x [..., in] around the kernel, as its siblings do."""
    if x.dim() == 2:
        return original(self, layer, x, bias)
    out = original(self, layer, x.reshape(-1, x.shape[-1]), bias)
    return out.reshape(*x.shape[:-1], out.shape[-1])


@patches.wrap(
    f"{LINEAR}.scaled_mm.cutlass:CutlassInt8ScaledMMLinearKernel.is_supported",
    relies_on=f"{LINEAR}:is_supported_and_can_implement_kernel",  # which asks with the capability
    evidence="optional",
    why="From compute capability 10.0 on, an int8 engine takes CUTLASS's kernel, which refuses int8 there at the first forward.",
    remove_when="vLLM's CUTLASS kernel says that it does not support int8 from 10.0 on.",
)
def int8_is_supported(
    original: Any, cls: type, compute_capability: int | None = None
) -> tuple[bool, str | None]:
    """Call CUTLASS's kernel unsupported from capability 10.0 on; vLLM then takes Triton's, the next in its list."""
    if (compute_capability or 0) >= 100:  # None on a CPU
        return False, "refuses int8 from compute capability 10.0 on"
    return original(cls, compute_capability)


def use() -> None:
    """Put the kernels in for good, in this process; does nothing on another platform.

    An updated engine and a fresh one can be compared to the last bit only if both multiply alike."""
    import vllm._custom_ops as ops
    from vllm.model_executor.kernels import linear
    from vllm.platforms import current_platform

    from flashpatch.patches.fp8.precision import scaled_quant

    if not current_platform.is_cpu():
        return
    _put_first(linear._POSSIBLE_FP8_KERNELS)
    if not _has_cpu_kernel():
        ops.scaled_fp8_quant = scaled_quant.scaled_fp8_quant
