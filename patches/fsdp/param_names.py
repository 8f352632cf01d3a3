"""Map exported tensors to entries of the state dict: verl renames entries and splits packed experts.

Sources: ``verl/utils/model.py: convert_weight_keys`` and ``verl/workers/engine/fsdp/utils.py:
unfuse_moe_params``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from flashpatch.patches.fsdp.shards import Own

GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


@dataclass(frozen=True)
class Part:
    """Name the elements ``[begin, end)`` of the flattened entry ``of``, exported with ``shape``."""

    of: str
    begin: int
    end: int
    shape: tuple[int, ...]


def converted(entries: dict[str, Own], module: Any) -> dict[str, Own]:
    """Return the entries under the names by which verl exports them."""
    from verl.utils.model import convert_weight_keys

    return convert_weight_keys(entries, getattr(module, "_fsdp_wrapped_module", module))


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
