"""One fp8 linear kernel for every CPU, put where vLLM chooses linear kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashpatch.record import Contract, Patch

MODULE = "vllm.model_executor.kernels.linear"


def put_first(possible: Mapping[Any, list[type]]) -> None:
    """Put the kernel before vLLM's own in ``possible``, platform to kernels, best first. At most once."""
    from vllm.platforms.interface import PlatformEnum

    from flashpatch.patches.fp8.vllm.cpu_kernel import FlashPatchCPUFP8LinearKernel

    if FlashPatchCPUFP8LinearKernel not in possible[PlatformEnum.CPU]:
        possible[PlatformEnum.CPU].insert(0, FlashPatchCPUFP8LinearKernel)


def take_out(possible: Mapping[Any, list[type]]) -> None:
    """Undo `put_first`; layers that chose the kernel keep it."""
    from vllm.platforms.interface import PlatformEnum

    from flashpatch.patches.fp8.vllm.cpu_kernel import FlashPatchCPUFP8LinearKernel

    if FlashPatchCPUFP8LinearKernel in possible[PlatformEnum.CPU]:
        possible[PlatformEnum.CPU].remove(FlashPatchCPUFP8LinearKernel)


PATCH = Patch(
    id="fp8.vllm.possible_fp8_kernels",
    targets=(f"{MODULE}:_POSSIBLE_FP8_KERNELS",),
    requires="vllm>=0.24",
    apply=lambda site: put_first(site.original),
    undo=lambda site: take_out(site.original),
    contract=Contract(
        exists=(
            f"{MODULE}:init_fp8_linear_kernel",
            f"{MODULE}.scaled_mm.ScaledMMLinearKernel:FP8ScaledMMLinearKernel.apply_scaled_mm",
            f"{MODULE}.scaled_mm.ScaledMMLinearKernel:FP8ScaledMMLinearKernel.process_weights_after_loading",
            f"{MODULE}.scaled_mm.ScaledMMLinearKernel:FP8ScaledMMLinearLayerConfig.weight_quant_key",
            "vllm.platforms.interface:PlatformEnum",
        ),
    ),
    evidence="install",
    scope=frozenset({"worker"}),
    why="torch's fp8 product is slow on CPUs, by a factor of ten, or of thousands if oneDNN takes its "
    "reference kernel (CPUs with AMX); vLLM's own AMX kernel for one scale per tensor fails.",
    how="Puts a kernel for CPUs before vLLM's: weights stay in fp8 and are decoded exactly, by integer shifts, "
    "into a buffer that all layers share. vLLM's register_linear_kernel would put it last.",
    remove_when="vLLM's fp8 kernels are exact and fast on CPUs with and without AMX.",
)
