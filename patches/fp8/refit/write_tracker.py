"""Track every write of any weight loader.

`WriteTracker` is a dispatch mode active only while weights are being loaded. It identifies tensors by their
storage, so a write through any view, ``.data`` or slice is seen: the storage is allocated, the destination is
recorded in the parameter's coverage, the dtype of the source is checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit.pristine_params import PristineParam


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without torch's wrapper around `__torch_dispatch__`: code is not compiled while such a mode is active."""
        return False


class WriteTracker(_Mode):
    """Report writes into given storages.

    Args:
        table: storage identity to the parameters in it.
        on_write: called with ``(param, view, source)`` before each write; ``source``: the tensor that is copied, None for a
            constant, and for what another operator computes the tensor written to.
        on_access: called with ``(param, read)`` before its storage is accessed; ``read``: values may be read, not only
            overwritten or viewed. It gives the storage memory, and returns whether reading needs no further call.
        guarded: gives storage identity to name, for tensors that must not be written; called when a loader first
            writes to a storage that is not in ``table``, which most never do.
        accessible: identity of storages that have memory -> whether they may be read without a further call of
            ``on_access``; grows, and whoever frees a storage empties it.
    """

    def __init__(
        self,
        table: dict[int, list[PristineParam]],
        on_write: Callable[[PristineParam, torch.Tensor, torch.Tensor | None], None],
        on_access: Callable[[PristineParam, bool], bool] = lambda param, read: True,
        guarded: Callable[[], dict[int, str]] = dict,
        accessible: dict[int, bool] | None = None,
    ) -> None:
        super().__init__()
        self._table = table
        self._on_write = on_write
        self._on_access = on_access
        self._guarded = functools.cache(guarded)
        self._accessible = {} if accessible is None else accessible

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = _operators.get(id(func))  # an operator's own hash is slow
        if known is None:
            written = None if func in _METADATA else written_arguments(func)
            known = _operators[id(func)] = _Operator(
                getattr(func, "_op", func), written, func.is_view, func in _OVERWRITING, func is _COPY, func
            )
        run, written, is_view, _, _, _ = known
        if func is _COPIES:
            for pair in zip(args[0], args[1], strict=True):
                self.__torch_dispatch__(_COPY, types, pair)
            return None
        if written is None:
            return run(*args, **(kwargs or {}))
        for key, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                identity = storage_identity(arg)
                if key in written:
                    self._look_at(known, arg, identity, args, True)
                elif identity in self._table:
                    readable = self._accessible.get(identity)
                    if not readable and (readable is None or not is_view):
                        self._look_at(known, arg, identity, args, False)
            elif isinstance(arg, (list, tuple)):
                self._look_at_items(known, arg, args, key in written)
        if kwargs:
            for key, arg in kwargs.items():
                items = arg if isinstance(arg, (list, tuple)) else (arg,)
                self._look_at_items(known, items, args, key in written)
        return run(*args, **kwargs) if kwargs else run(*args)

    def _look_at_items(self, operator: _Operator, items: Iterable, args: tuple, is_write: bool) -> None:
        for item in items:
            if isinstance(item, torch.Tensor):
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
        readable = self._accessible.get(identity)
        if not readable:
            read = not (operator.is_view or (is_write and operator.sets and not _reads(identity, args[1:])))
            if read or readable is None:
                self._accessible[identity] = all([self._on_access(param, read) for param in params])
        for param in params if is_write else ():
            part = param.part(tensor)
            if part is None:
                continue
            if operator.is_copy and tensor.dtype == param.dtype:
                _check_dtype(param, args[1])
            source = args[1] if operator.is_copy else None if operator.sets else tensor
            self._on_write(param, part, source)


class NamedWeights:
    """Pass (name, tensor) pairs through and remember the last one, in ``current`` and ``tensor``."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights = weights
        self.current = ""
        self.tensor: torch.Tensor | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            self.current, self.tensor = name, tensor
            yield name, tensor


_COPY = torch.ops.aten.copy_.default
_COPIES = torch.ops.aten._foreach_copy_.default
# need no memory; every other view does
_METADATA = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


_OVERWRITING = {_COPY, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


def _reads(identity: int | None, sources: tuple) -> bool:
    for source in sources:
        if isinstance(source, torch.Tensor) and storage_identity(source) == identity:
            return True
    return False


class _Operator(NamedTuple):
    run: Any
    written: frozenset[int | str] | None  # the arguments that it writes to, None if it is ignored
    is_view: bool
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


def tensors_in(arg: Any) -> Iterable[torch.Tensor]:
    if isinstance(arg, torch.Tensor):
        return (arg,)
    if isinstance(arg, (list, tuple)):
        return [item for item in arg if isinstance(item, torch.Tensor)]
    return ()


def storage_identity(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


def _check_dtype(param: PristineParam, source: torch.Tensor) -> None:
    """Reject a dtype the destination cannot load.

    compressed-tensors' shapes of packed experts are integers, for which vLLM makes parameters in the model's dtype; no
    kernel reads them.
    """
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
        writes: each tensor that was written to, a view perhaps, and a copy of what it held before, in order.
    """

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

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Write everything back if what runs within raises."""
        try:
            yield
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Write everything back, and forget it."""
        while self.writes:
            tensor, before = self.writes.pop()
            tensor.copy_(before)
