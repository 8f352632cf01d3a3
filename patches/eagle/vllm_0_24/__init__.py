"""Patch what vLLM 0.24 alone, which verl 0.9.1 pins, has wrong on a CPU. The patches of ``vllm`` are applied beside these."""

from __future__ import annotations

from flashpatch.patches.eagle.vllm_0_24 import cpu_draft_tokens

PATCHES = cpu_draft_tokens.PATCHES
