"""Map exported tensors to entries of the state dict: verl renames entries, sends adapters without their base, and splits packed experts.

Sources: ``verl/utils/model.py: convert_weight_keys``, ``verl/workers/engine/fsdp/utils.py: unfuse_moe_params``, and for
adapters ``verl/utils/fsdp_utils.py: collect_lora_params``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from flashpatch.patches.fsdp.shards import Own

GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"
_ADAPTER = re.compile(r"(\.lora_\w+)\.default(?=\.|$)")
"""A part of an adapter; verl's has the name that PEFT gives the first one, and is exported without it."""


@dataclass(frozen=True)
class Part:
    """Name the elements ``[begin, end)`` of the flattened entry ``of``, exported with ``shape``."""

    of: str
    begin: int
    end: int
    shape: tuple[int, ...]


def exported(entries: dict[str, Own], module: Any, adapter: bool, base_sync_done: bool) -> dict[str, Own]:
    """Return the entries that verl exports, under the names that it gives them.

    Args:
        entries: of the state dict, by name.
        module: the trainer's model.
        adapter: whether it has a LoRA adapter that is not merged.
        base_sync_done: whether of such a model the adapter is exported, not the base.
    """
    from verl.utils.model import convert_weight_keys

    whole = getattr(module, "_fsdp_wrapped_module", module)
    if adapter:
        entries = _of_adapter(entries) if base_sync_done else _of_base(entries, whole.peft_config["default"])
    return convert_weight_keys(entries, whole)


def _of_adapter(entries: Mapping[str, Own]) -> dict[str, Own]:
    return {_ADAPTER.sub(r"\1", name): own for name, own in entries.items() if "lora_" in name}


def _of_base(entries: Mapping[str, Own], adapter: Any) -> dict[str, Own]:
    from verl.utils.fsdp_utils import replace_lora_wrapper

    names = {name: name.removeprefix("base_model.model.").replace(".base_layer", "") for name in entries}
    return {
        replace_lora_wrapper(names[name], adapter): own
        for name, own in entries.items()
        if "lora_" not in name
    }


def parts(entries: Mapping[str, Own]) -> dict[str, Part]:
    """Every name that the entries may be exported under: their own, and those of the experts in a packed
    one."""
    found = {name: Part(name, 0, prod(own.shape), own.shape) for name, own in entries.items()}
    for name, own in entries.items():
        for expert in _experts(name, own.shape):
            found.setdefault(*expert)
    return found


def _experts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Part]]:
    """Packed ``[experts, 2 x inner, hidden]`` holds each expert's gate, then its up projection."""
    if len(shape) != 3 or not name.endswith((GATE_UP, DOWN)):
        return
    number, rows, width = shape
    fused = name.endswith(GATE_UP)
    base = name.removesuffix(".gate_up_proj").removesuffix(".down_proj")
    half = -(-rows // 2)  # as torch.chunk cuts
    pieces = (("gate_proj", 0, half), ("up_proj", half, rows)) if fused else (("down_proj", 0, rows),)
    for expert in range(number):
        for projection, first, last in pieces:
            begin, end = (expert * rows + first) * width, (expert * rows + last) * width
            part = Part(name, begin, end, (last - first, width))
            yield f"{base}.{expert}.{projection}.weight", part
