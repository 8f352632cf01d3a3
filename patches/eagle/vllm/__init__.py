"""The family on vLLM's engine."""

from __future__ import annotations

from flashpatch.patches.eagle.vllm import capture, ending, expand, orders, speculate, sync

PATCHES = (ending.PATCH, orders.PATCH, *capture.PATCHES, *speculate.PATCHES, *sync.PATCHES, expand.PATCH)
