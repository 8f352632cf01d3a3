"""vLLM's fp8 linear kernel for every CPU."""

from __future__ import annotations

import torch
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)
from vllm.platforms import current_platform

from flashpatch.patches.fp8.precision import e4m3
from flashpatch.patches.fp8.precision.product import scaled_mm


class FlashPatchCPUFP8LinearKernel(FP8ScaledMMLinearKernel):
    """W8A8: a scale per channel or tensor for weights, per token or tensor for activations.

    Activations are quantized by vLLM's own ``QuantFP8``. Weights and scales stay as the scheme stored them:
    an update has nothing to refold."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if not current_platform.is_cpu():
            return False, "requires CPU."
        if current_platform.fp8_dtype() is not torch.float8_e4m3fn:
            return False, "requires e4m3fn as the platform's fp8."
        return True, None

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        weight, activation = c.weight_quant_key.scale.group_shape, c.activation_quant_key.scale.group_shape
        if weight.row > 0 and weight.col > 0:
            return False, "does not handle block-quantized weights."
        if not (activation.is_per_token() or activation.is_per_tensor()):
            return False, "requires activations with a scale per token or per tensor."
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Let channels with a NaN weight answer NaN: the product itself takes weights for numbers. Raises PatchError if
        weights cannot be decoded exactly in this process."""
        e4m3.require_exact()
        weight, scale, _, _ = self._get_layer_params(layer)
        nan = e4m3.rows_with_nan(weight.t())
        if nan.any():
            scale.data[nan if scale.numel() == len(nan) else ...] = torch.nan

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list,
    ) -> torch.Tensor:
        """Multiply quantized activations A [m, k] and weights B [k, n]; called by vLLM's ``apply_weights``."""
        product = torch.ops.flashpatch.fp8_scaled_mm if torch.compiler.is_compiling() else scaled_mm
        return product(A, B, As, Bs, bias, out_dtype).view(output_shape)


def _shape_of_scaled_mm(a, b, a_scale, b_scale, bias, out_dtype):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


_LIBRARY = torch.library.Library("flashpatch", "FRAGMENT")  # one opaque operator for torch.compile
_LIBRARY.define(
    "fp8_scaled_mm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType out_dtype) -> Tensor"
)
_LIBRARY.impl("fp8_scaled_mm", scaled_mm, "CPU")
torch.library.register_fake("flashpatch::fp8_scaled_mm", _shape_of_scaled_mm, lib=_LIBRARY)
