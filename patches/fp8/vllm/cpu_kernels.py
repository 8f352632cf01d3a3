"""The family's kernels for CPUs in a vLLM without FlashPatch: the fresh engine of a comparison."""

from __future__ import annotations


def use() -> None:
    """Put the kernels in for good, in this process; does nothing on another platform.

    An updated engine and a fresh one can be compared to the last bit only if both multiply alike.
    """
    import vllm._custom_ops as ops
    from vllm.model_executor.kernels import linear
    from vllm.platforms import current_platform

    from flashpatch.patches.fp8.precision.scaled_quant import scaled_fp8_quant
    from flashpatch.patches.fp8.vllm import linear_kernels
    from flashpatch.patches.fp8.vllm.scaled_fp8_quant import has_cpu_kernel

    if not current_platform.is_cpu():
        return
    linear_kernels.put_first(linear._POSSIBLE_FP8_KERNELS)
    if not has_cpu_kernel():
        ops.scaled_fp8_quant = scaled_fp8_quant
