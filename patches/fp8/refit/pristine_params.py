"""Record each parameter before the first load, and make empty ones like it (FlashRL's Record1).

A `PristineParam` describes one parameter (or checkpoint-fed buffer) as the model's constructor made it: class,
attributes such as its weight loader, shape, strides, dtype, and which other parameters share its storage. It never
holds the original tensor. `PristineParam.stage` makes an equal tensor with *no memory behind it*: the storage is
allocated when the first element is accessed, and what was not written is filled with a poison that reads as NaN before
it is read.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit.coverage import Coverage
from flashpatch.patches.fp8.refit.errors import update_error
from flashpatch.patches.fp8.refit.policy import listed

SMALL = 1 << 14  # elements up to which initial values are kept, for parameters a checkpoint may leave alone
_POISON = 0xFF  # every byte: NaN in all floating formats, -1 in integers
_ONLINE = "vllm.model_executor.model_loader.reload.layerwise"


@dataclass
class PristineParam:
    """One tensor of one module as it was before the first load.

    Attributes:
        module, key, is_buffer: where the tensor is registered.
        name: dotted name in the model.
        tensor_class, attributes, shape, stride, offset, dtype: of the tensor that the constructor made.
        storage: the memory it shares with others.
        initial: its values on the host, if it is small, or a buffer that checkpoints may bring: an engine may take the device's memory away.
        loaded: what was loaded into it last, likewise; kept for `Layer.scales`.
        optional: a checkpoint may leave it out.
        alias: a buffer that shares the memory of a parameter.
        expected: what the first load wrote; None while unknown (dummy weights).
        coverage: what the open update has written.
        largest: its largest magnitude, on the device, if `Layer.prepare` has launched that.
        tensor: the staged tensor, None before `stage`.
    """

    module: torch.nn.Module
    key: str
    name: str
    is_buffer: bool
    tensor_class: type
    attributes: dict[str, Any]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage: SharedStorage
    initial: torch.Tensor | None
    optional: bool = False
    alias: bool = False
    expected: Coverage | None = None
    coverage: Coverage = field(init=False)
    largest: torch.Tensor | None = None
    end: int = field(init=False)
    _fills_storage: bool = field(init=False)  # row by row, from its first byte to its last
    tensor: torch.Tensor | None = None
    loaded: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.end = _end(self.offset, self.shape, self.stride)
        dense = torch.empty(self.shape, device="meta").stride() == self.stride and self.offset == 0
        self._fills_storage = dense and self.end * self.dtype.itemsize == self.storage.nbytes
        self.coverage = Coverage(self.shape, self.stride, self.offset)

    def live(self) -> torch.Tensor | None:
        """Return the tensor that the module has under this name now."""
        return (self.module._buffers if self.is_buffer else self.module._parameters).get(self.key)

    def forget(self) -> None:
        """Count what was staged as not written; the tensor to load into stays the same."""
        if self.coverage.touched:
            self.coverage = Coverage(self.shape, self.stride, self.offset)
            self.largest = None

    def reset(self) -> None:
        """Forget what was written, and free the staged tensor."""
        self.forget()
        self.tensor = None
        self.storage.release()

    def stage(self) -> torch.Tensor:
        """Return the empty tensor to load into; the same object until `reset`."""
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

    def allocate(self, read: bool = True) -> bool:
        """Give the staged tensor memory: poison, unless loaders always leave gaps (padding) in it.

        Gaps hold their initial values, or zeros in a large tensor.

        Args:
            read: values may be read next. Until then memory that a loader may fill whole gets no poison.

        Returns:
            Whether that is done: False while the poison waits.
        """
        storage, coverage = self.storage, self.coverage
        if not storage.allocated:
            gaps = self.expected is not None and 0 < self.expected.covered < self.expected.total
            if read or gaps or not self._fills_storage:
                if storage.allocate(0 if gaps else _POISON) and gaps and self.initial is not None:
                    self.stage().detach().copy_(self.initial)
            else:
                storage.allocate(None)
        waits = storage.unset and self._fills_storage
        if waits and coverage.covered == coverage.total:
            storage.unset = False
        elif waits and read:
            raw = torch.empty(0, dtype=torch.uint8, device=storage.device)
            raw.set_(storage.get(), 0, (coverage.total, self.dtype.itemsize), (self.dtype.itemsize, 1))
            raw[~coverage.elements().view(-1).to(raw.device)] = _POISON
            storage.unset = False
        return not storage.unset

    def fill(self, running: torch.Tensor | None, left_out: bool = False) -> None:
        """Give the staged tensor values if the checkpoint brings none.

        Args:
            running: the tensor of this name in the live layer, used if initial values are not kept.
            left_out: the update leaves tensors out, which stay what was loaded before.

        Raises:
            PatchError: there is no source of values.
        """
        tensor = self.stage().detach()
        whole = not self.written and tensor.numel() > 0
        self.allocate(read=not whole)
        if not whole:
            return
        source = self.initial if self.initial is not None else running
        if left_out and self.loaded is not None:
            source = self.loaded
        if source is None or source.shape != tensor.shape or source.dtype != tensor.dtype:
            raise PatchError(
                f"{self.name} is not in the checkpoint and its initial values are gone",
                patch="fp8.update",
                advice="Report this model; until then update it by restarting the engine.",
            )
        if source is not running and source.numel() == 1 and source.dtype.itemsize > 1:
            tensor.fill_(source.item())  # to be copied from the host it would wait for the device
        else:
            tensor.copy_(source)
        self.storage.unset &= not self._fills_storage

    def copy_small(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Return a copy on the host of what was loaded, None if it is large or nothing was."""
        if tensor is None or tensor.numel() > SMALL or tensor.is_meta:
            return None
        return tensor.detach().to("cpu", copy=True)

    def part(self, view: torch.Tensor) -> torch.Tensor | None:
        """Return ``view``, of the same storage, in this parameter's dtype; None if they do not overlap."""
        if view.dtype != self.dtype:
            view = view.view(self.dtype)
        return view if view.storage_offset() < self.end and self._starts_before(view) else None

    def _starts_before(self, view: torch.Tensor) -> bool:
        first = view.storage_offset()
        return self.offset <= first or self.offset < _end(first, view.shape, view.stride())

    @property
    def required(self) -> bool:
        """Whether a complete update must write this parameter."""
        if self.expected is None:
            return not self.is_buffer and not self.optional
        return self.expected.covered > 0

    @property
    def may_come(self) -> bool:
        """Whether it is a buffer of which nothing has shown whether checkpoints bring it: no index table, persistent."""
        weight = self.is_buffer and (self.dtype.is_floating_point or not self.shape)
        return weight and self.expected is None and self.key not in self.module._non_persistent_buffers_set

    @property
    def complete(self) -> bool:
        if self.expected is not None and self.coverage.covered < self.expected.covered:
            return False  # asked after every tensor
        if not self.required and not (self.may_come and self.written):
            return True
        if self.expected is None:
            return self.coverage.covered == self.coverage.total
        return self.coverage.satisfies(self.expected)

    @property
    def written(self) -> bool:
        return self.coverage.covered > 0

    def missing(self) -> list[str]:
        """Return what is still missing, by checkpoint name if the first load showed it."""
        if self.complete:
            return []
        known = self.coverage.missing(self.expected)
        return known or [f"{self.name} ({self.coverage.covered} of {self.coverage.total} elements)"]


class SharedStorage:
    """Memory of the parameters that shared a storage when they were constructed."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device
        self.allocated = False
        self.identity = 0  # of the storage that `get` returns
        self.unset = False  # allocated, and what was not written yet is neither poison nor a value
        self._storage: torch.UntypedStorage | None = None

    def get(self) -> torch.UntypedStorage:
        """Return the storage, which has zero bytes until `allocate`."""
        if self._storage is None:
            self._storage = torch.UntypedStorage(0, device=self.device)
            self.identity = self._storage._cdata
        return self._storage

    def allocate(self, byte: int | None) -> bool:
        """Allocate the memory, every byte set to ``byte`` if given; False, and nothing, if it is allocated already."""
        storage = self.get()
        self.allocated = True
        if storage.nbytes() >= self.nbytes:
            return False
        storage.resize_(self.nbytes)
        self.unset = byte is None
        if byte is None:
            return True
        raw = torch.empty(0, dtype=torch.uint8, device=self.device)
        raw.set_(storage, 0, (self.nbytes,), (1,)).fill_(byte)
        return True

    def free(self, held_by: int) -> None:
        """Give the memory back now, if nothing but ``held_by`` staged tensors uses it."""
        storage = self._storage
        if storage is None or not storage.resizable():  # what a view of numpy's has is not
            return
        if torch._C._storage_Use_Count(storage._cdata) == held_by + 1:
            storage.resize_(0)
            self.allocated = self.unset = False

    def release(self) -> None:
        """Let go of the storage: the next tensor is staged in another."""
        self._storage = None
        self.allocated = self.unset = False


def record(modules: dict[str, torch.nn.Module], device: torch.device) -> list[PristineParam]:
    """Describe every parameter and buffer of ``modules`` (name to module), before any load."""
    storages: dict[int, SharedStorage] = {}
    shared: dict[int, PristineParam] = {}
    params = []
    for prefix, module in modules.items():
        for is_buffer, table in ((False, module._parameters), (True, module._buffers)):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                if is_lazy(tensor) or hasattr(tensor, "local_tensors"):
                    raise PatchError(
                        f"{prefix}.{key} is a {type(tensor).__name__}, which has no tensor of its own before it is loaded",
                        patch="fp8.vllm.initialize_model",
                        advice="Weights of this model cannot be updated in place; open a new engine on them.",
                    )
                param = _record_one(
                    module, key, f"{prefix}.{key}".lstrip("."), is_buffer, tensor, storages, device
                )
                twin = shared.setdefault(id(tensor), param)
                param.storage = twin.storage
                params.append(param)
    parameters = {id(param.storage) for param in params if not param.is_buffer}
    for param in params:
        param.alias = param.is_buffer and id(param.storage) in parameters
    return params


def _record_one(module, key, name, is_buffer, tensor, storages, device) -> PristineParam:
    raw = tensor.untyped_storage()
    storage = storages.get(raw._cdata)
    if storage is None:
        home = device if tensor.is_meta else tensor.device
        storage = storages[raw._cdata] = SharedStorage(raw.nbytes(), home)
    weight = is_buffer and tensor.is_floating_point() and key not in module._non_persistent_buffers_set
    keep = (weight or tensor.numel() <= SMALL) and not tensor.is_meta
    return PristineParam(
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
        initial=tensor.detach().to("cpu", copy=True) if keep else None,
    )


def _end(offset: int, shape: Sequence[int], stride: Sequence[int]) -> int:
    return offset + sum((n - 1) * step for n, step in zip(shape, stride)) + 1


def _plain_loader(value: Any) -> Any:
    """The weight loader below the wrappers that vLLM's online quantization puts around it."""
    while (
        isinstance(value, types.FunctionType)
        and value.__module__ == _ONLINE
        and hasattr(value, "__wrapped__")
    ):
        value = value.__wrapped__
    return value


def storage_table(
    placed: Iterable[tuple[PristineParam, torch.Tensor | None]],
) -> dict[int, list[PristineParam]]:
    """Map storage identity to the parameters whose tensor, given with each, lives there."""
    table: dict[int, list[PristineParam]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for param, tensor in placed:
            if tensor is not None:
                table.setdefault(tensor.untyped_storage()._cdata, []).append(param)
    return table


def refuse_lost_writes(
    params: Iterable[PristineParam], kept: Callable[[torch.nn.Module], set[str]], model: str
) -> None:
    """Refuse a model of whose parameters some were written on meta, and are there still.

    Args:
        params: of a model whose ``load_weights`` has just returned.
        kept: names of a module's parameters for which the engine keeps what came.
        model: class name, for the error.

    Raises:
        PatchError: the first load has lost values.
    """
    lost = [
        param.name for param in params if _is_written_on_meta(param) and param.key not in kept(param.module)
    ]
    if lost:
        raise update_error(
            f"load_weights wrote {listed(lost)} past the weight loaders, into tensors on meta: nothing was loaded",
            "Open this model unquantized (FLASHPATCH=bf16), or from a checkpoint that is quantized.",
            model,
        )


def _is_written_on_meta(param: PristineParam) -> bool:
    live = param.live()
    return param.expected is not None and param.expected.covered > 0 and live is not None and live.is_meta
