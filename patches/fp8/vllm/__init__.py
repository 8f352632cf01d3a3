"""Patches of vLLM's own kernels."""

from __future__ import annotations

from flashpatch.patches.fp8.vllm import int8_inputs, linear_kernels, scaled_fp8_quant

PATCHES = (linear_kernels.PATCH, scaled_fp8_quant.PATCH, int8_inputs.PATCH)
