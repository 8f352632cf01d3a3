"""Read what a LoRA adapter holds, and where it goes, from SGLang's objects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flashpatch.patches._shared.context import having
from flashpatch.patches.fp8.lora import check
from flashpatch.patches.fp8.lora.check import Pair, Place

if TYPE_CHECKING:
    import torch

Parts = dict[str, "torch.Tensor"]

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers of SGLang that hold several of a checkpoint's."""
_NAME = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.default)?(?:\.weight)?$")
_IN_LAYER = re.compile(r"\blayers\.\d+\..*")


@contextmanager
def sent() -> Iterator[Parts]:
    """Within, collect the tensors of adapters as they came, by name, and give each adapter memory of its own.

    SGLang keeps a tensor in the memory it came in, a sender's or a mapped file's, until a request first needs the adapter."""
    from sglang.srt.lora.lora import LoRAAdapter

    found: Parts = {}
    plain = LoRAAdapter._process_weight

    def process(self, name: str, loaded_weight: torch.Tensor) -> None:
        own = loaded_weight.detach().cpu()
        found[name] = own.clone() if own.data_ptr() == loaded_weight.data_ptr() else own
        plain(self, name, found[name])

    with having(LoRAAdapter, "_process_weight", process):
        yield found


@contextmanager
def unnamed(manager: Any, name: str) -> Iterator[None]:
    """Within, SGLang's ``LoRAManager`` holds no adapter that is called ``name``, and so takes another one."""
    held = {number: ref for number, ref in manager.lora_refs.items() if ref.lora_name == name}
    for number in held:
        del manager.lora_refs[number]
    try:
        yield
    finally:
        manager.lora_refs.update(held)


class Staged:
    """An adapter that a ``LoRAManager`` has loaded, out of its sight until it is put in place.

    Args:
        manager: which has loaded it, or failed to.
        number: SGLang's id of the adapter."""

    def __init__(self, manager: Any, number: str) -> None:
        self._manager, self._number = manager, number
        self.adapter = manager.loras.pop(number, None)
        self.config = manager.configs.pop(number, None)
        self._ref = manager.lora_refs.pop(number, None)
        self._count(-1)

    def place(self) -> None:
        """Give it back to the manager."""
        self._manager.loras[self._number] = self.adapter
        self._manager.configs[self._number] = self.config
        self._manager.lora_refs[self._number] = self._ref
        self._count(1)

    def restore(self) -> None:
        """Take it from the manager again; the adapters from before never left it."""
        for held in (self._manager.loras, self._manager.configs, self._manager.lora_refs):
            held.pop(self._number, None)
        self._count(-1)

    def _count(self, change: int) -> None:
        if self._ref is not None:
            self._manager.num_pinned_loras += change * int(self._ref.pinned)


def checked(manager: Any, staged: Staged, name: str, parts: Mapping[str, torch.Tensor], patch: str) -> str:
    """Check an adapter, ``staged`` in SGLang's ``LoRAManager``, its tensors ``parts`` as they came; return its digest.
    Raises PatchError, which names ``patch`` and all reasons, if the engine would not do with it what the trainer does."""
    pairs = _pairs(parts, staged.adapter.scaling)
    return check.checked(
        name, pairs, _consumed(manager, staged.adapter, pairs), staged.config.hf_config, patch
    )


def _pairs(parts: Mapping[str, torch.Tensor], scaling: float) -> dict[str, Pair]:
    """Return an adapter's parts by the trainer's names of its modules; what is no part of one keeps its name."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in parts.items():
        known = _NAME.match(name)
        module, side = known.groups() if known else (name, "A")
        found.setdefault(module, {})[side] = tensor
    return {module: Pair(sides.get("A"), sides.get("B"), scaling) for module, sides in found.items()}


def _consumed(manager: Any, adapter: Any, pairs: Mapping[str, Pair]) -> dict[str, Place | None]:
    """Return the places of the modules whose parts the engine reads, by the trainer's names."""
    wrapped = {_inside(name): layer for name, layer in _wrapped(manager).items()}
    there = dict(check.places_of((layer.base_layer, _parts(name)) for name, layer in wrapped.items()))
    left = {
        _inside(known[1])
        for layer in adapter.layers
        for name in layer.weights
        if (known := _NAME.match(name))
    } | {_inside(known[1]) for name in adapter.embedding_layers if (known := _NAME.match(name))}
    found: dict[str, Place | None] = {}
    taken: set[str] = set()
    for name in pairs:
        inside = _inside(name)
        read = inside in there and (inside in left) == (inside in wrapped)
        if read and inside not in taken:
            found[name] = there[inside]
            taken.add(inside)
    return found


def _parts(name: str) -> list[str]:
    above, _, last = name.rpartition(".")
    return [f"{above}.{part}" for part in FUSED[last]] if last in FUSED else [name]


def _wrapped(manager: Any) -> dict[str, Any]:
    """Return the engine's layers that take an adapter, by name."""
    found = {name: layer for layers in manager.lora_modules for name, layer in layers.items()}
    ends = {"embed_tokens": manager.embed_tokens_module, "lm_head": manager.lm_head_module}
    return {**found, **{name: layer for name, layer in ends.items() if layer is not None}}


def _inside(name: str) -> str:
    """Return the part of a module's name by which SGLang finds its layer: trainers and engines differ in what is before."""
    known = _IN_LAYER.search(name)
    return known[0] if known else name.rpartition(".")[2]
