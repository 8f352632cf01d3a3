"""Patches for vLLM before 0.26 alone: one that newer versions do not need must not keep the others from them."""

from __future__ import annotations

from flashpatch.patches.fp8.vllm_0_24 import float32_head

PATCHES = (float32_head.PATCH,)
