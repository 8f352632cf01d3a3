"""Let a layer whose kernel has packed its weight away take adapters."""

from __future__ import annotations

from typing import Any

from flashpatch.record import Contract, Patch


def on_device(original, base_layer: Any) -> Any:
    """Around ``_get_lora_device``: a packed layer has no weight to ask; its other tensors, or the platform, say as much."""
    if getattr(base_layer, "weight", False) is not None:
        return original(base_layer)
    import torch
    from vllm.platforms import current_platform

    tensors = (*base_layer.parameters(), *base_layer.buffers())
    return next((tensor.device for tensor in tensors), torch.device(current_platform.device_type))


PATCH = Patch(
    id="fp8.vllm_lora.get_lora_device",
    targets=("vllm.lora.layers.utils:_get_lora_device",),
    requires="vllm>=0.24",
    wrapper=on_device,
    contract=Contract(params=("base_layer",), mentions=("base_layer.weight.device",)),
    evidence="optional",
    scope=frozenset({"worker"}),
    why="On a CPU vLLM's int8 layers keep no weight once their kernel has packed it, so an engine with adapters does not open.",
    how="Answers with the device of the layer's other tensors.",
    remove_when="vLLM asks for the device of a layer without its weight.",
)
