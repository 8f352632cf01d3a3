"""Mend what vLLM's LoRA code does wrong on CPUs."""

from __future__ import annotations

from typing import Any

from flashpatch.decorate import Patches

OPERATORS = "vllm.lora.ops.torch_ops.lora_ops"

patches = Patches(
    "fp8",
    "vllm>=0.24",
    framework="vllm_lora",
    scope="worker",
    evidence="optional",  # an engine may have no adapters
)


@patches.wrap(
    f"{OPERATORS}:bgmv_expand_slice",
    relies_on="lora_b_weights",
    id="fp8.vllm_lora.bgmv_expand_slice",
    why="A fused layer's parts go through an operator of their own.",
    remove_when="vLLM's operators for CPUs leave rows without an adapter as they are.",
)
@patches.wrap(
    f"{OPERATORS}:bgmv_expand",
    relies_on="lora_b_weights",
    why="On a CPU vLLM takes the adapter at place -1, the last, for a request without one, which is then answered under it, "
    "with nothing in the log.",
    remove_when="vLLM's operators for CPUs leave rows without an adapter as they are.",
)
def bgmv_expand(
    original,
    inputs: Any,
    lora_b_weights: Any,
    output_tensor: Any,
    lora_indices_tensor: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Add nothing to rows without an adapter: those of the base's requests in a batch with an adapter's."""
    own = inputs.masked_fill((lora_indices_tensor < 0).unsqueeze(1), 0)
    original(own, lora_b_weights, output_tensor, lora_indices_tensor, *args, **kwargs)


@patches.wrap(
    "vllm.lora.layers.utils:_get_lora_device",
    relies_on="base_layer.weight.device",
    why="On a CPU vLLM's int8 layers keep no weight once their kernel has packed it, so an engine with adapters does not open.",
    remove_when="vLLM asks for the device of a layer without its weight.",
)
def get_lora_device(original, base_layer: Any) -> Any:
    """Answer with the device of a layer's other tensors, or the platform's, if its kernel has packed its weight away."""
    if getattr(base_layer, "weight", False) is not None:
        return original(base_layer)
    import torch
    from vllm.platforms import current_platform

    tensors = (*base_layer.parameters(), *base_layer.buffers())
    return next((tensor.device for tensor in tensors), torch.device(current_platform.device_type))
