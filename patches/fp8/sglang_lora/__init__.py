"""Follow the LoRA adapters of SGLang's engines.

A group of its own: if SGLang's code for LoRA has changed, engines without adapters are updated as before."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.fp8.sglang_lora import registry, worker

PATCHES = collected(worker, registry)
"""The patches of this group."""
