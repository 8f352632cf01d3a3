"""Make vLLM's own rounding of weights faster on CPUs.

A group of its own, for vLLM since 0.31: what only saves time must not keep other patches from other versions.
"""

from __future__ import annotations

from flashpatch.patches.fp8.vllm_rounding import online_fp8

PATCHES = (online_fp8.AMAX, online_fp8.QUANT)
