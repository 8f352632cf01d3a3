"""Record1: what each weight looked like before anything was loaded, and how to make an empty one again.

A `Slot` remembers one parameter (or checkpoint-fed buffer) as the model's constructor made it: class,
attributes such as its weight loader, shape, strides, dtype, and which other slots share its storage. It never
holds the original tensor. `Slot.stage` makes an equal tensor with *no memory behind it*: the storage is
allocated, and filled with a poison that reads as NaN, when the first element is touched.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit.coverage import Coverage

SMALL = 1 << 14  # elements up to which initial values are kept, for tensors a checkpoint may leave alone
_POISON = 0xFF  # every byte: NaN in all floating formats, -1 in integers
_ONLINE = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass
class Slot:
    """One tensor of one module as it was before the first load (Record1)."""

    module: torch.nn.Module
    key: str
    name: str  # dotted name in the model
    is_buffer: bool
    tensor_class: type
    attributes: dict[str, Any]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage: StorageSlot
    initial: torch.Tensor | None
    optional: bool = False  # a checkpoint may leave it out
    alias: bool = False  # a buffer that shares the memory of a parameter
    expected: Coverage | None = None  # what the first load wrote; None while unknown (dummy weights)
    coverage: Coverage = field(init=False)
    tensor: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.reset()

    def live(self) -> torch.Tensor | None:
        """The tensor the module has under this name now."""
        return (self.module._buffers if self.is_buffer else self.module._parameters).get(self.key)

    def forget(self) -> None:
        """Count what was staged as not written; the tensor to load into stays the same."""
        self.coverage = Coverage(self.shape, self.stride, self.offset)

    def reset(self) -> None:
        """Forget what was staged, and let go of the tensor."""
        self.forget()
        self.tensor = None
        self.storage.release()

    def stage(self) -> torch.Tensor:
        """The empty tensor to load into; the same object until `reset`."""
        if self.tensor is None:
            data = torch.empty(0, dtype=self.dtype, device=self.storage.device)
            storage = self.storage.get()
            nbytes = storage.nbytes()
            data.set_(storage, self.offset, self.shape, self.stride)  # grows a storage that is too small
            if storage.nbytes() > nbytes:
                storage.resize_(nbytes)
            if self.tensor_class is not torch.Tensor:
                data = torch.Tensor._make_subclass(self.tensor_class, data)
            vars(data).update(self.attributes)
            self.tensor = data
        return self.tensor

    def touch(self) -> None:
        """Give the staged tensor memory: poison, unless loaders always leave gaps (padding) in it.

        Gaps hold what they held at birth, or zeros in a large tensor.
        """
        gaps = self.expected is not None and 0 < self.expected.covered < self.expected.total
        if self.storage.allocate(0 if gaps else _POISON) and gaps and self.initial is not None:
            self.stage().detach().copy_(self.initial)

    def fill(self, running: torch.Tensor | None) -> None:
        """Make sure the staged tensor has values where the checkpoint brings none.

        Args:
            running: the tensor of this name in the live layer, the source of last resort.
        """
        tensor = self.stage().detach()
        self.touch()
        if self.touched or tensor.numel() == 0:
            return
        source = self.initial if self.initial is not None else running
        if source is None or source.shape != tensor.shape or source.dtype != tensor.dtype:
            raise PatchError(
                f"{self.name} is not in the checkpoint and its initial values are gone",
                patch="fp8.update",
                advice="Report this model; until then update it by restarting the engine.",
            )
        tensor.copy_(source)

    def part(self, view: torch.Tensor) -> torch.Tensor | None:
        """``view``, of the same storage, in this slot's dtype; None if they lie apart."""
        if view.dtype != self.dtype:
            view = view.view(self.dtype)
        return view if view.storage_offset() < self.end and self.offset < _end(view) else None

    @property
    def end(self) -> int:
        return self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride)) + 1

    @property
    def required(self) -> bool:
        """Whether a complete update must write this slot."""
        if self.expected is None:
            return not self.is_buffer and not self.optional
        return self.expected.covered > 0

    @property
    def complete(self) -> bool:
        if not self.required:
            return True
        if self.expected is None:
            return self.coverage.covered == self.coverage.total
        return self.coverage.satisfies(self.expected)

    @property
    def touched(self) -> bool:
        return self.coverage.covered > 0

    def missing(self) -> list[str]:
        """What is still missing, by checkpoint name where the first load taught it."""
        if self.complete:
            return []
        known = self.coverage.missing(self.expected)
        return known or [f"{self.name} ({self.coverage.covered} of {self.coverage.total} elements)"]


class StorageSlot:
    """Memory shared by the slots that shared a storage at birth."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device
        self._storage: torch.UntypedStorage | None = None

    def get(self) -> torch.UntypedStorage:
        """The storage, with zero bytes until `allocate`."""
        if self._storage is None:
            self._storage = torch.UntypedStorage(0, device=self.device)
        return self._storage

    def allocate(self, byte: int) -> bool:
        """Give the storage its memory, every byte set to ``byte``; False, and nothing, if it has it already."""
        storage = self.get()
        if storage.nbytes() >= self.nbytes:
            return False
        storage.resize_(self.nbytes)
        raw = torch.empty(0, dtype=torch.uint8, device=self.device)
        raw.set_(storage, 0, (self.nbytes,), (1,)).fill_(byte)
        return True

    def free(self, held_by: int) -> None:
        """Give the memory back now, if nothing but ``held_by`` staged tensors uses it."""
        storage = self._storage
        if storage is not None and torch._C._storage_Use_Count(storage._cdata) == held_by + 1:
            storage.resize_(0)

    def release(self) -> None:
        self._storage = None


def record(modules: dict[str, torch.nn.Module], device: torch.device) -> list[Slot]:
    """Record1 of every parameter and buffer of ``modules`` (name to module), taken before any load."""
    storages: dict[int, StorageSlot] = {}
    shared: dict[int, Slot] = {}
    slots = []
    for prefix, module in modules.items():
        for is_buffer, table in ((False, module._parameters), (True, module._buffers)):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                if is_lazy(tensor):
                    raise PatchError(
                        f"{prefix}.{key} has no shape before it is loaded",
                        patch="fp8.vllm.initialize_model",
                        advice="Weights of this model cannot be updated in place; open a new engine on them.",
                    )
                slot = _record_one(
                    module, key, f"{prefix}.{key}".lstrip("."), is_buffer, tensor, storages, device
                )
                twin = shared.setdefault(id(tensor), slot)
                slot.storage = twin.storage
                slots.append(slot)
    parameters = {id(slot.storage) for slot in slots if not slot.is_buffer}
    for slot in slots:
        slot.alias = slot.is_buffer and id(slot.storage) in parameters
    return slots


def _record_one(module, key, name, is_buffer, tensor, storages, device) -> Slot:
    raw = tensor.untyped_storage()
    storage = storages.get(raw._cdata)
    if storage is None:
        home = device if tensor.is_meta else tensor.device
        storage = storages[raw._cdata] = StorageSlot(raw.nbytes(), home)
    keep = tensor.numel() <= SMALL and not tensor.is_meta
    return Slot(
        module=module,
        key=key,
        name=name,
        is_buffer=is_buffer,
        tensor_class=type(tensor),
        attributes={k: _plain_loader(v) for k, v in vars(tensor).items()},
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=tensor.storage_offset(),
        dtype=tensor.dtype,
        storage=storage,
        initial=tensor.detach().clone() if keep else None,
    )


def _end(view: torch.Tensor) -> int:
    return view.storage_offset() + sum((n - 1) * step for n, step in zip(view.shape, view.stride())) + 1


def _plain_loader(value: Any) -> Any:
    """The weight loader below the wrappers that vLLM's online quantization puts around it."""
    while (
        isinstance(value, types.FunctionType)
        and value.__module__ == _ONLINE
        and hasattr(value, "__wrapped__")
    ):
        value = value.__wrapped__
    return value


def storage_table(slots: list[Slot], tensors: Callable[[Slot], torch.Tensor | None]) -> dict[int, list[Slot]]:
    """Storage identity to the slots that live in it, for the tensor that ``tensors`` gives for each slot."""
    table: dict[int, list[Slot]] = {}
    for slot in slots:
        tensor = tensors(slot)
        if tensor is not None:
            table.setdefault(tensor.untyped_storage()._cdata, []).append(slot)
    return table
