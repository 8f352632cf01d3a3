"""Read what a LoRA adapter holds, and where it goes, from vLLM's objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashpatch.patches.fp8.lora import check
from flashpatch.patches.fp8.lora.check import Pair, Place


def checked(manager: Any, adapter: Any, request: Any, patch: str) -> str:
    """Check a loaded ``LoRAModel``, before its parts are packed, and give it memory of its own; return its digest.
    ``manager`` is vLLM's ``LoRAModelManager``. Raises PatchError, which names ``patch`` and all reasons, if the engine
    would not do with it what the trainer does."""
    _own(adapter)
    pairs = {
        name: Pair(layer.lora_a, layer.lora_b, layer.scaling)
        for name, layer in adapter.loras.items()
        if not layer.is_packed
    }
    return check.checked(request.lora_name, pairs, _consumed(manager, adapter), config(request), patch)


def _own(adapter: Any) -> None:
    """Copy all tensors: they lie in a mapped file, or with a sender, and vLLM multiplies lora_B by the scaling there."""
    for layer in adapter.loras.values():
        if not layer.is_packed:
            layer.lora_a, layer.lora_b = (
                None if one is None else one.clone() for one in (layer.lora_a, layer.lora_b)
            )


def config(request: Any) -> dict[str, Any]:
    """Return PEFT's configuration of the adapter that a request brings, from its tensors' or the folder it names."""
    given = getattr(request, "peft_config", None)
    if given is not None:
        return dict(given)
    from vllm.lora.utils import get_adapter_absolute_path

    folder = Path(get_adapter_absolute_path(request.lora_path))
    return json.loads((folder / "adapter_config.json").read_text())


def _consumed(manager: Any, adapter: Any) -> dict[str, Place | None]:
    """Return the places of the adapter's parts, by the names that the parts have: a model may know them by others."""
    by_part = {id(part): name for name, part in adapter.loras.items()}
    found, fused = {}, manager.packed_modules
    layers = (
        (getattr(one, "base_layer", None), fused.get(name) or [name]) for name, one in manager.modules.items()
    )
    for name, place in check.places_of(layers):
        part = manager._get_lora_layer_weights(adapter, name)
        if part is not None:
            found[by_part[id(part)]] = place
    return found
