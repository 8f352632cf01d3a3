"""Follow the LoRA adapters of vLLM's engines.

A group of its own: if vLLM's code for LoRA has changed, engines without adapters are updated as before."""

from flashpatch.decorate import collected
from flashpatch.patches.fp8.vllm_lora import cpu, worker_manager

PATCHES = collected(worker_manager, cpu)
