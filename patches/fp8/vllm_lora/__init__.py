"""Follow the LoRA adapters of vLLM's engines.

A group of its own: if vLLM's code for LoRA has changed, engines without adapters are updated as before.
"""

from __future__ import annotations

from flashpatch.patches.fp8.vllm_lora import layers, worker_manager

PATCHES = (
    layers.PATCH,
    worker_manager.CREATE,
    worker_manager.ADD,
    worker_manager.ADD_LORA,
    worker_manager.REMOVE,
    worker_manager.REMOVE_ALL,
)
"""The patches of this group."""
