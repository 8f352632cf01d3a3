"""Describe tensors as the model's constructor made them, stage equal ones, and track every write to them.

A `PristineParam` describes one parameter (or checkpoint-fed buffer) before the first load (FlashRL's Record1). `stage` makes
an equal tensor with *no memory behind it*: the storage is allocated when its first element is accessed, and filled with a
poison that reads as NaN. `Coverage` counts what has been written, as boxes in the
tensor's index space; writes that are no box fall back to a mask. `WriteTracker` is a dispatch mode active while weights are
loaded: it knows tensors by their storage, so a write through any view, ``.data`` or slice is seen."""

from __future__ import annotations

import functools
import hashlib
import math
import types
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from flashpatch.errors import PatchError
from flashpatch.patches._shared import fingerprint
from flashpatch.patches.fp8.update.events import listed, update_error

Box = tuple[tuple[int, int], ...]  # per dimension: (first index, one past the last)


@dataclass
class Coverage:
    """Elements written to one tensor of the given ``shape`` and ``stride`` at ``offset`` in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    boxes: dict[Box, int] = field(default_factory=dict)  # box -> number of times it was written
    names: dict[Box, str] = field(default_factory=dict)  # box -> checkpoint name that wrote it first
    mask: torch.Tensor | None = None
    overlaps: bool = False  # some element was written by two different views
    covered: int = 0  # number of elements written at least once
    total: int = field(init=False)  # number of elements
    # (dimension, size, stride), the largest stride first
    _order: list[tuple[int, int, int]] = field(init=False)
    # shape and stride of a view -> its extents
    _extents: dict[tuple, list[int] | None] = field(default_factory=dict)
    _dense: bool = field(init=False)  # whether the elements are all those between the first and the last
    _rows: dict[tuple[int, int], list[Box]] = field(default_factory=dict)  # first edge of boxes -> the boxes
    _edges: list[tuple[int, int]] = field(default_factory=list)  # the first edges, sorted
    _longest: int = 0  # of the first edges

    def __post_init__(self) -> None:
        self.total = math.prod(self.shape)
        dims = zip(range(len(self.shape)), self.shape, self.stride)
        self._order = sorted(dims, key=lambda dim: -dim[2])
        self._dense = _last(self.shape, self.stride, 0) + 1 == self.total

    def clear(self) -> None:
        """Count every element as not written."""
        self.boxes.clear()
        self.names.clear()
        self._rows.clear()
        self._edges.clear()
        self.mask, self.overlaps, self.covered, self._longest = None, False, 0, 0

    def add(self, view: torch.Tensor, name: str = "") -> None:
        """Record a write to ``view``, which shares the tensor's storage."""
        if view.numel() == 0:  # a loader's "zero the padding" where there is none
            return
        box = self.box(view)
        if box is None:
            self._paint(view)
            return
        times = self.boxes.get(box, 0)
        if self.mask is not None or (not times and self._rows and self.overlaps_any(box)):
            self._paint(view)
        if not times:
            self._place(box)
            self.names[box] = name
        self.boxes[box] = times + 1

    def satisfies(self, expected: Coverage) -> bool:
        """Whether everything written in ``expected`` has been written here as often."""
        if self.covered < expected.covered:
            return False
        # Where writes lie over one another (cleared first, scaled at the end), each of them is needed.
        needed = {box: n for box, n in expected.boxes.items() if n > 1 or expected.overlaps}
        if any(self.boxes.get(box, 0) < times for box, times in needed.items()):
            return False
        if self.covered == self.total or (
            expected.mask is None and expected.boxes.keys() <= self.boxes.keys()
        ):
            return True
        return not bool((expected.elements() & ~self.elements()).any())

    def missing(self, expected: Coverage | None) -> list[str]:
        """Return checkpoint names of the expected boxes not written yet; empty when names are unknown."""
        if expected is None:
            return []
        names = (expected.names[box] for box in expected.boxes if box not in self.boxes)
        return list(dict.fromkeys(name for name in names if name))

    def _place(self, box: Box) -> None:
        """Count a new box, and file it under its edge in the first dimension: there an expert is found at once."""
        if self.mask is None:
            self.covered += _volume(box)
        edge = box[0] if box else (0, 1)
        if edge not in self._rows:
            self._rows[edge] = []
            insort(self._edges, edge)
            self._longest = max(self._longest, edge[1] - edge[0])
        self._rows[edge].append(box)

    def overlaps_any(self, box: Box | None, but: Collection[Box | None] = ()) -> bool:
        """Whether a box has elements of those that were written, or may have; ``but``: boxes that do not count."""
        if box is None or self.mask is not None:
            return self.covered > 0
        start, end = box[0] if box else (0, 1)
        first = bisect_left(self._edges, (start - self._longest + 1, 0))
        for edge in self._edges[first : bisect_left(self._edges, (end, 0))]:
            for other in self._rows[edge]:
                if _overlap(box, other) and other not in but:
                    return True
        return False

    def box(self, view: torch.Tensor) -> Box | None:
        """The rectangle ``view`` occupies in the tensor's index space, or None if it is no rectangle."""
        rest = view.storage_offset() - self.offset
        if rest < 0 or 0 in view.shape:
            return None
        if rest == 0 and view.numel() == self.total and view.is_contiguous() and self._dense:
            return tuple([(0, size) for size in self.shape])
        form = view.shape, view.stride()
        extents = self._extents.get(form, ())
        if extents == ():  # the same for all experts of a layer
            extents = self._extents[form] = self._lay_out(*form)
        if extents is None:
            return None
        box: list[tuple[int, int]] = [(0, 1)] * len(self.shape)
        for dim, size, step in self._order:
            start, extent = 0, extents[dim]
            if size > 1:
                start, rest = divmod(rest, step) if step else (0, rest)
            if start + extent > size:
                return None
            box[dim] = (start, start + extent)
        return None if rest else tuple(box)

    def _lay_out(self, shape: Sequence[int], stride: Sequence[int]) -> list[int] | None:
        """How far a view extends along each dimension of the tensor; None if it is no rectangle in it."""
        long = [(step, size) for size, step in zip(shape, stride) if size > 1]
        sizes = dict(long)
        if len(sizes) != len(long):
            return None
        extents = [1] * len(self.shape)
        for dim, size, step in self._order:
            if size > 1:
                extents[dim] = sizes.pop(step, 1)
        return None if sizes else extents

    def elements(self) -> torch.Tensor:
        """Return which elements have been written: bool, in the tensor's shape, on the host."""
        if self.mask is not None:
            return self.mask
        mask = torch.zeros(self.shape, dtype=torch.bool, device="cpu")
        for box in self.boxes:
            mask[tuple(slice(*edge) for edge in box)] = True
        return mask

    def _paint(self, view: torch.Tensor) -> None:
        self.mask = self.elements()
        if 0 in view.shape or self.total == 0:
            return
        first = min(self.offset, view.storage_offset())
        ends = (
            _last(self.shape, self.stride, self.offset),
            _last(view.shape, view.stride(), view.storage_offset()),
        )
        marks = torch.zeros(max(ends) + 1 - first, dtype=torch.bool, device="cpu")
        marks.as_strided(view.shape, view.stride(), view.storage_offset() - first).fill_(True)
        painted = marks.as_strided(self.shape, self.stride, self.offset - first)
        self.overlaps |= bool((painted & self.mask).any())
        self.mask |= painted
        self.covered = int(torch.count_nonzero(self.mask))


def _last(shape, stride, offset: int) -> int:
    return offset + sum((size - 1) * step for size, step in zip(shape, stride))


@functools.lru_cache(1 << 10)  # layers are alike, and a hit is no call of Python
def _volume(box: Box) -> int:
    return math.prod([end - first for first, end in box])


def _overlap(a: Box, b: Box) -> bool:
    for (a0, a1), (b0, b1) in zip(a, b):
        if a0 >= b1 or b0 >= a1:
            return False
    return True


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
        layer: that it belongs to.
        optional: a checkpoint may leave it out.
        brings: whether updates bring what the first load has not shown (it was of dummy weights): a buffer, a scale that may be
            left out; None: not known.
        alias: a buffer that shares the memory of a parameter.
        expected: what the first load wrote; None while unknown (dummy weights).
        filled: the first load filled it in, see `NamedWeights.fills`.
        coverage: what the open update has written.
        tensor: the staged tensor, None before `stage`."""

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
    layer: Any = None
    optional: bool = False
    brings: bool | None = None
    alias: bool = False
    expected: Coverage | None = None
    filled: bool = False
    coverage: Coverage = field(init=False)
    end: int = field(init=False)
    tensor: torch.Tensor | None = None
    loaded: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.end = _end(self.offset, self.shape, self.stride)
        self.coverage = Coverage(self.shape, self.stride, self.offset)

    def live(self) -> torch.Tensor | None:
        """Return the tensor that the module has under this name now."""
        return (self.module._buffers if self.is_buffer else self.module._parameters).get(self.key)

    def forget(self) -> None:
        """Count what was staged as not written; the tensor to load into stays the same."""
        if self.coverage.boxes or self.coverage.mask is not None:
            self.coverage.clear()

    def stage(self) -> torch.Tensor:
        """Return the empty tensor to load into; the same object until its layer is released."""
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

    def allocate(self, filled: bool = False) -> None:
        """Give the staged tensor memory: poison, unless loaders always leave gaps (padding) in it, or it is ``filled`` at once.

        Gaps hold their initial values, or zeros in a large tensor."""
        if self.storage.allocated:
            return
        gaps = self.expected is not None and 0 < self.expected.covered < self.expected.total
        whole = filled and self.coverage.total * self.dtype.itemsize == self.storage.nbytes
        byte = None if whole else 0 if gaps else _POISON
        if self.storage.allocate(byte) and gaps and self.initial is not None:
            self.stage().detach().copy_(self.initial)

    def fill(self, running: torch.Tensor | None, left_out: bool = False) -> None:
        """Give the staged tensor values if the checkpoint brings none.

        Args:
            running: the tensor of this name in the live layer, used if initial values are not kept.
            left_out: the update leaves tensors out, which stay what was loaded before.

        Raises:
            PatchError: there is no source of values."""
        tensor = self.stage() if self.tensor is None else self.tensor
        if self.coverage.covered or not self.coverage.total:
            return self.allocate()
        tensor = tensor.detach()
        source = self.initial if self.initial is not None else running
        if left_out and self.loaded is not None:
            source = self.loaded
        if source is None or source.shape != tensor.shape or source.dtype != tensor.dtype:
            raise PatchError(
                f"{self.name} is not in the checkpoint and its initial values are gone",
                patch="fp8.update",
                advice="Report this model; until then update it by restarting the engine.",
            )
        self.allocate(filled=True)
        if source is not running and source.numel() == 1 and source.dtype.itemsize > 1:
            tensor.fill_(source.item())  # to be copied from the host it would wait for the device
        else:
            tensor.copy_(source)

    def copy_small(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Return a copy on the host of what was loaded, None if it is large or nothing was."""
        if tensor is None or tensor.numel() > SMALL or tensor.is_meta:
            return None
        return tensor.detach().to("cpu", copy=True)

    def part(self, view: torch.Tensor) -> torch.Tensor | None:
        """Return ``view``, of the same storage, in this parameter's dtype; None if they do not overlap."""
        if view.dtype != self.dtype:
            view = view.view(self.dtype)
        first = view.storage_offset()
        if first >= self.end:
            return None
        starts_before = self.offset <= first or self.offset < _end(first, view.shape, view.stride())
        return view if starts_before else None

    @property
    def required(self) -> bool:
        """Whether a complete update must write this parameter."""
        if self.expected is None:
            return self.brings or not (self.is_buffer or self.optional)
        return self.expected.covered > 0

    @property
    def may_come(self) -> bool:
        """Whether it is a buffer of which nothing has shown whether checkpoints bring it: no index table, persistent."""
        weight = self.is_buffer and (self.dtype.is_floating_point or not self.shape)
        unknown = weight and self.expected is None and not self.brings
        return unknown and self.key not in self.module._non_persistent_buffers_set

    @property
    def undecided(self) -> bool:
        """Whether nothing has shown yet that it comes, or that it does not."""
        return self.brings is None and self.may_come and not self.layer.deferred

    @property
    def complete(self) -> bool:
        expected, covered = self.expected, self.coverage.covered  # asked after every tensor
        if expected is not None:
            return covered >= expected.covered and (not expected.covered or self.coverage.satisfies(expected))
        required = self.brings or not (self.is_buffer or self.optional)
        if not required and not (covered and self.is_buffer and self.may_come):
            return True
        return covered == self.coverage.total

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
        if byte is not None:
            raw = torch.empty(0, dtype=torch.uint8, device=self.device)
            raw.set_(storage, 0, (self.nbytes,), (1,)).fill_(byte)
        return True

    def release(self, held_by: int) -> None:
        """Let go of the storage: the next tensor is staged in another. Its memory goes now, if nothing but ``held_by`` staged
        tensors uses it."""
        storage, self._storage, self.allocated = self._storage, None, False
        if storage is None or not held_by or not storage.resizable():  # what a view of numpy's has is not
            return
        if torch._C._storage_Use_Count(storage._cdata) == held_by + 1:
            storage.resize_(0)


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
        PatchError: the first load has lost values."""
    written = [one for one in params if one.expected is not None and one.expected.covered]
    on_meta = [one for one in written if (live := one.live()) is not None and live.is_meta]
    lost = [one.name for one in on_meta if one.key not in kept(one.module)]
    if lost:
        raise update_error(
            f"load_weights wrote {listed(lost)} past the weight loaders, into tensors on meta: nothing was loaded",
            "Open this model unquantized (FLASHPATCH=bf16), or from a checkpoint that is quantized.",
            model,
        )


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without torch's wrapper around `__torch_dispatch__`: code is not compiled while such a mode is active."""
        return False


class Unseen:
    """Within, no mode sees what is done: `_disable_current_modes` of torch's, in a seventh of its calls."""

    def __enter__(self) -> None:
        number = torch._C._len_torch_dispatch_stack()
        self._modes = [torch._C._pop_torch_dispatch_stack(None) for _ in range(number)]

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            torch._C._push_on_torch_dispatch_stack(mode)


class WriteTracker(_Mode):
    """Report writes into given storages.

    Args:
        table: storage identity to the parameters in it.
        on_write: called with ``(param, view, source)`` before each write; ``source``: the tensor that is copied, None for a
            constant, and for what another operator computes the tensor written to.
        on_access: called with a parameter before its storage is first accessed; gives it memory.
        guarded: gives storage identity to name, for tensors that must not be written; called when a loader first
            writes to a storage that is not in ``table``, which most never do.
        accessible: identity of storages that have memory; grows, and whoever frees a storage empties it."""

    def __init__(
        self,
        table: dict[int, list[PristineParam]],
        on_write: Callable[[PristineParam, torch.Tensor, torch.Tensor | None], None],
        on_access: Callable[[PristineParam], None] = lambda param: None,
        guarded: Callable[[], dict[int, str]] = dict,
        accessible: set[int | None] | None = None,
    ) -> None:
        super().__init__()
        self._table = table
        self._on_write = on_write
        self._on_access = on_access
        self._guarded = functools.cache(guarded)
        self._accessible = set() if accessible is None else accessible

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = _operators.get(id(func))  # an operator's own hash is slow
        if known is None:
            written = None if func in _METADATA else written_arguments(func)
            known = _operators[id(func)] = _Operator(
                getattr(func, "_op", func), written, func in _OVERWRITING, func is _COPY, func
            )
        run, written = known.run, known.written
        if func is _COPIES:
            for pair in zip(args[0], args[1], strict=True):
                self.__torch_dispatch__(_COPY, types, pair)
            return None
        if written is None:
            return run(*args, **(kwargs or {}))
        for key, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                try:  # as `storage_identity`, without a call for each operator
                    identity = arg.untyped_storage()._cdata
                except (RuntimeError, NotImplementedError):
                    identity = None
                if key in written:
                    self._look_at(known, arg, identity, args, True)
                elif identity in self._table and identity not in self._accessible:
                    self._look_at(known, arg, identity, args, False)
            elif isinstance(arg, (list, tuple)):
                self._look_at_items(known, arg, args, key in written)
        if kwargs:
            for key, arg in kwargs.items():
                self._look_at_items(known, arg, args, key in written)
        return run(*args, **kwargs) if kwargs else run(*args)

    def _look_at_items(self, operator: _Operator, arg: Any, args: tuple, is_write: bool) -> None:
        for item in tensors_in(arg):
            self._look_at(operator, item, storage_identity(item), args, is_write)

    def _look_at(
        self, operator: _Operator, tensor: torch.Tensor, identity: int | None, args: tuple, is_write: bool
    ) -> None:
        params = self._table.get(identity)
        if params is None:
            if is_write and identity in self._guarded():
                raise PatchError(
                    f"a weight loader wrote straight into {self._guarded()[identity]}, which an update must not",
                    advice="Report this model; until then update it by restarting the engine.",
                )
            return
        if identity not in self._accessible:
            self._accessible.add(identity)
            for param in params:
                self._on_access(param)
        for param in params if is_write else ():
            part = param.part(tensor)
            if part is None:
                continue
            if operator.is_copy and tensor.dtype == param.dtype != args[1].dtype:
                _check_dtype(param, args[1])
            source = args[1] if operator.is_copy else None if operator.sets else tensor
            self._on_write(param, part, source)


class NamedWeights:
    """Pass (name, tensor) pairs through, and tell later which of them a loader has written elsewhere already.

    Attributes:
        current, tensor: the last pair.
        wide: whether any came in float32.
        over: there are no more."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights = weights
        self.current, self.wide, self.over = "", False, False
        self.tensor: torch.Tensor | None = None
        # where each lies, its number and its storage: the memory of one that is gone may be another's
        self._places: list[tuple[int, int, int, weakref.ref[torch.UntypedStorage]]] = []
        # number, and address in its memory -> what was written from there, for each tensor that came with this memory
        self._written: dict[tuple[int, int], list[PristineParam]] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            _check_kind(name, tensor)
            self.current, self.tensor = name, tensor
            self.wide |= tensor.dtype in (torch.float32, torch.float64)
            if has_memory(tensor):
                start, storage, span = tensor.data_ptr(), tensor.untyped_storage(), tensor.nbytes
                if not tensor.is_contiguous():
                    span = _end(0, tensor.shape, tensor.stride()) * tensor.itemsize
                insort(self._places, (start, len(self._places), start + span, weakref.ref(storage)))
            yield name, tensor
        self.over = True

    def fills(
        self,
        param: PristineParam,
        source: torch.Tensor,
        table: Mapping[int | None, list[PristineParam]],
        in_use: Container[int | None] = (),
    ) -> bool:
        """Return whether a loader fills ``param`` in with what it has written elsewhere before, in other memory.

        Args:
            param: what is written to.
            source: the tensor that is copied.
            table: storage identity to the parameters in it.
            in_use: storage identities of live parameters that are shown."""
        try:  # as `storage_identity`, without a call for each write
            identity = source.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):
            return False
        if identity in in_use or identity in table:
            return param not in table.get(identity, ())
        start = source.data_ptr()
        if (at := bisect_left(self._places, (start + 1,)) - 1) < 0:
            return False
        begin, number, end, storage = self._places[at]
        if start >= end or storage() is None:
            return False
        written = self._written.setdefault((number, start), [param])
        if any([one.storage is param.storage and one.offset == param.offset for one in written]):
            return False  # two names of one tensor, such as a tied head's
        first = bisect_left(self._places, (begin,))
        if sum([other() is storage() for *_, other in self._places[first : at + 1]]) == len(written):
            return True
        written.append(param)
        return False


_COPY = torch.ops.aten.copy_.default
_COPIES = torch.ops.aten._foreach_copy_.default
# need no memory; every other view does
_METADATA = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


_OVERWRITING = {_COPY, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


class _Operator(NamedTuple):
    run: Any
    written: frozenset[int | str] | None  # the arguments that it writes to, None if it is ignored
    sets: bool  # overwrites what it writes to, whatever it was
    is_copy: bool
    itself: Any  # held, so that its identity stays its own


_operators: dict[int, _Operator] = {}  # by identity: an operator's own hash is slow


@functools.cache
def written_arguments(func: Any) -> frozenset[int | str]:
    """Return positions and names of the arguments that an operator writes to."""
    arguments = func._schema.arguments
    written = [
        (i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    return frozenset(key for pair in written for key in pair)


def tensors_in(arg: Any) -> list[torch.Tensor]:
    items = arg if isinstance(arg, (list, tuple)) else (arg,)
    return [item for item in items if isinstance(item, torch.Tensor)]


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values lie in its own memory: a wrapper's lie in other tensors, whatever it says of them."""
    return not torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python) and tensor.data_ptr() != 0


def storage_identity(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


def _check_kind(name: str, tensor: Any) -> None:
    """Reject what loaders of dense tensors do not copy, before torch's operators do in words of their own."""
    if not isinstance(tensor, torch.Tensor):
        found, advice = (
            f"{type(tensor).__module__}.{type(tensor).__name__}",
            "Send torch tensors: torch.from_numpy(...) of an array.",
        )
    elif hasattr(tensor, "full_tensor"):
        found, advice = "DTensor", "Send full_tensor() of it, which every rank must call."
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        found = "nested tensor" if tensor.is_nested else f"{tensor.layout} tensor of {tensor.dtype}"
        advice = "Send a dense tensor: to_dense() of a sparse one, dequantize() of a quantized one."
    else:
        return
    raise PatchError(f"{name} came as a {found}, which weights are not loaded from", advice=advice)


def _check_dtype(param: PristineParam, source: torch.Tensor) -> None:
    """Reject a dtype the destination cannot load.

    compressed-tensors' shapes of packed experts are integers, for which vLLM makes parameters in the model's dtype; no
    kernel reads them."""
    if not _fits(param.dtype, source.dtype) and not param.name.endswith("_weight_shape"):
        raise PatchError(
            f"{param.name} holds {_short(param.dtype)} but was given {_short(source.dtype)} values",
            advice="Send the weights in the precision of the checkpoint the engine was opened on.",
        )


@functools.cache
def _fits(held: torch.dtype, given: torch.dtype) -> bool:
    if held.is_floating_point:  # what is rounded on the way comes rounded
        return given == held if held.itemsize == 1 else given.is_floating_point and given.itemsize > 1
    return not given.is_floating_point and not given.is_complex


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class WriteLog(_Mode):
    """Within, copy what an operator is about to overwrite.

    Args:
        tensors: whose memory is watched.

    Attributes:
        watched: identity of a storage to a tensor in it.
        writes: each tensor that was written to, a view perhaps, and a copy of what it held before, in order."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.writes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.watched = {storage_identity(tensor): tensor for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        written = written_arguments(func)
        for key, arg in (*enumerate(args), *(kwargs or {}).items()) if written else ():
            for tensor in tensors_in(arg) if key in written else ():
                if storage_identity(tensor) in self.watched:
                    self.writes.append((tensor, tensor.clone()))
        return func(*args, **(kwargs or {}))

    def undo(self) -> None:
        """Write everything back, and forget it."""
        while self.writes:
            tensor, before = self.writes.pop()
            tensor.copy_(before)


class HostCopies:
    """Copy the memory of tensors to the host, once per storage, and back into the same memory.

    Args:
        tensors: on any device.
        without: tensors whose memory is not copied, though some of ``tensors`` share it."""

    def __init__(self, tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()) -> None:
        skipped = {tensor.untyped_storage()._cdata for tensor in without}
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for key, memory in found.items():
            if key not in skipped and memory.nbytes():
                copy = torch.UntypedStorage(memory.nbytes(), device="cpu")
                self._copies.append((memory, copy.copy_(memory)))

    def restore(self) -> None:
        """Copy everything back; the tensors' memory must be there again."""
        for memory, copy in self._copies:
            memory.copy_(copy)


def checksum_of(
    model: torch.nn.Module, deferred: Callable[[torch.nn.Module], bool], constants: Iterable[torch.Tensor]
) -> str:
    """Return a checksum of a model's weights as kernels read them, 16 hexadecimal digits.

    Two engines of one configuration have the same checksum if they hold the same bits: parameters and buffers, and
    what layers processed last derive from others. What a kernel has packed into memory of its own is not seen.

    Args:
        model: the model.
        deferred: whether a module is processed after all others.
        constants: tensors that modules held beside parameters and buffers after the first load."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_named(model, deferred, constants)):
        sums = fingerprint.of(tensor)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {sums}\n".encode())
    return digest.hexdigest()[:16]


def _named(
    model: torch.nn.Module, deferred: Callable[[torch.nn.Module], bool], constants: Iterable[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        yield from _parts(name, tensor.detach())
    known = set(map(id, constants))
    for path, module in model.named_modules():
        if deferred(module):
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and id(value) in known:
                    yield from _parts(f"{path}.{key}", value)


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
    else:
        for key in flatten()[0]:
            yield from _parts(f"{name}.{key}", getattr(tensor, key))
