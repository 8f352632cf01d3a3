"""vLLM's int8 linear kernel on CPUs with AMX takes inputs of any number of dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    import torch


def on_apply_weights_sgl(
    original: Any, self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Around ``_apply_weights_sgl``: flatten leading dimensions of ``x`` [..., in], as its siblings do."""
    if x.dim() == 2:
        return original(self, layer, x, bias)
    out = original(self, layer, x.reshape(-1, x.shape[-1]), bias)
    return out.reshape(*x.shape[:-1], out.shape[-1])


PATCH = Patch(
    id="fp8.vllm.apply_weights_sgl",
    targets=(
        "vllm.model_executor.kernels.linear.scaled_mm.cpu:CPUInt8ScaledMMLinearKernel._apply_weights_sgl",
    ),
    requires="vllm>=0.24",
    wrapper=on_apply_weights_sgl,
    contract=Contract(params=("layer", "x", "bias"), mentions=("int8_scaled_mm_with_quant",)),
    evidence="optional",
    scope=frozenset({"worker"}),
    why="On CPUs with AMX, int8 models whose linear layers get three-dimensional inputs (GPT-NeoX, OLMo2) end "
    "in 'mat1 must be a 2D tensor'.",
    how="Flattens the leading dimensions around the kernel.",
    remove_when="vLLM's kernel flattens its input itself.",
)
