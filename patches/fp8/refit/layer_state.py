"""Capture and restore the Python state that a layer owns besides its tensors.

Kernels keep derived state in many places: attributes of the layer, of its quantization method, of kernel
objects below that, in the cells of closures, in lists and dictionaries. A *container* is any of these. A
`LayerState` finds the containers that belong to one layer alone; `capture` copies their contents (one level each,
no tensor is copied) and `Snapshot.restore` writes them back into the same containers.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

_DEPTH = 8
_FOREIGN = (
    "torch.",
    "transformers.",
    "vllm.config.",
    "enum.",
    "logging.",
    "threading.",
    "re.",
    "pathlib.",
    "flashpatch.",
)
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    types.ModuleType,
    torch.Tensor,
    torch.dtype,
    torch.device,
    types.BuiltinFunctionType,
)

_DICTIONARIES = (dict, OrderedDict)  # most are empty tables of hooks, for which no further call is made

TABLES = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
"""A module's own tables, beside its ordinary attributes."""


_BASES = (types.FunctionType, functools.partial, types.MethodType, dict, tuple, list, set, torch.nn.Module)
_NOTHING = types.NoneType
_known: dict[type, type] = {}  # a model has a million values of some hundred types


def _kind(value: Any) -> type:
    """What a value is to a walk over containers: one of `_BASES`, ``object``, or `_NOTHING` if it holds no state."""
    return _known.get(type(value)) or _find_kind(value)


def _find_kind(value: Any) -> type:
    """The kind of a value; kept for its type, unless values of that type may pass for those of another."""
    cls = type(value)
    kind: type = _NOTHING
    if not isinstance(value, _LEAVES):
        stateful = hasattr(value, "__dict__") and not f"{cls.__module__}.".startswith(_FOREIGN)
        kind = next((base for base in _BASES if isinstance(value, base)), object if stateful else _NOTHING)
    if not any("__class__" in vars(base) for base in cls.__mro__ if base is not object):
        _known[cls] = kind
    return kind


class Snapshot:
    """Contents of containers at one moment: ``id(container) -> (container, contents)``."""

    def __init__(self) -> None:
        self.contents: dict[int, tuple[Any, Any]] = {}

    def add(self, container: Any) -> None:
        """Copy what ``container`` holds."""
        self.contents[id(container)] = (container, read(container))

    def with_tables_of(self, modules: Iterable[torch.nn.Module]) -> Snapshot:
        """Return this snapshot as it is after `restore`, when some modules' parameters and buffers were set anew."""
        snapshot = Snapshot()
        snapshot.contents = self.contents.copy()
        for module in modules:
            snapshot.add(module)
        return snapshot

    def holds(self, free: Iterable[torch.nn.Module] = ()) -> bool:
        """Whether every container holds just what it held; of ``free`` modules, the mode and the values of parameters aside."""
        free = set(map(id, free))
        for identity, (container, contents) in self.contents.items():
            if container.__class__ in _DICTIONARIES and not (container or contents):
                continue
            now, is_free = read(container), identity in free
            if not _same(now, contents, _kind(container) is torch.nn.Module, is_free):
                return False
            if is_free and now["_parameters"].keys() != contents["_parameters"].keys():
                return False
        return True

    def without_tensors(self, earlier: Snapshot) -> Snapshot:
        """Return the attributes in this snapshot, for tensors, of which it would keep the memory, those ``earlier``."""
        snapshot = Snapshot()
        for identity, (container, contents) in self.contents.items():
            if isinstance(contents, dict):
                old = earlier.contents.get(identity, (None, {}))[1]
                kept = {
                    key: old.get(key) if isinstance(value, torch.Tensor) else value
                    for key, value in contents.items()
                }
                tables = ("_parameters", "_buffers") if _kind(container) is torch.nn.Module else ()
                kept |= {table: dict.fromkeys(contents[table]) for table in tables}
                snapshot.contents[identity] = container, kept
        return snapshot

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that the containers held directly."""
        for _, contents in self.contents.values():
            values = contents.values() if isinstance(contents, dict) else contents
            yield from (value for value in values if isinstance(value, torch.Tensor))

    def restore(self) -> None:
        """Write every container's contents back, in place."""
        for container, contents in self.contents.values():
            if contents or container or container.__class__ not in _DICTIONARIES:
                write(container, contents)


def read(container: Any) -> Any:
    """Return a shallow copy of what ``container`` holds."""
    kind = _kind(container)
    if kind in (dict, list, set):
        return container.copy()
    if kind is types.FunctionType:
        return list(children(container))
    contents = vars(container).copy()
    if kind is torch.nn.Module:
        for table in TABLES:
            contents[table] = contents[table].copy()
    return contents


def _same(now: Any, before: Any, is_module: bool = False, is_free: bool = False) -> bool:
    """Whether two results of `read` are the same objects under the same keys."""
    if not isinstance(before, dict):
        return len(now) == len(before) and all(map(operator.is_, now, before))
    if now.keys() != before.keys():
        return False
    for key in before:
        if now[key] is before[key] or (is_free and key in ("_parameters", "training")):
            continue
        if not (is_module and key in TABLES and _same(now[key], before[key])):
            return False
    return True


def write(container: Any, contents: Any) -> None:
    """Write what `read` returned back; the container, and a module's own tables, keep their identity."""
    kind = _kind(container)
    if kind in (dict, set):
        _replace(container, contents)
    elif kind is types.FunctionType:
        cells, defaults = container.__closure__ or (), container.__defaults__ or ()
        values = iter(contents)
        for cell in cells:
            if (value := next(values)) is not _EMPTY:
                cell.cell_contents = value
        if defaults:
            container.__defaults__ = tuple(next(values) for _ in defaults)
        for key in container.__kwdefaults__ or ():
            container.__kwdefaults__[key] = next(values)
    elif kind is list:
        container[:] = contents
    elif kind is torch.nn.Module:
        state = vars(container)
        kept = {table: state[table] for table in TABLES}
        for key, live in kept.items():
            _replace(live, contents[key])
        _replace(state, {**contents, **kept})
    else:
        _replace(vars(container), contents)


def _replace(live: dict | set, contents: dict | set) -> None:
    if live or contents:
        live.clear()
        live.update(contents)


_EMPTY = object()
"""Stands for a closure cell with nothing in it."""


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def children(container: Any) -> Iterable[Any]:
    """Return the values directly held by ``container``."""
    kind = _kind(container)
    if kind is dict:
        return container.values()
    if kind in (list, set, tuple):
        return container
    if kind is torch.nn.Module:
        attributes = [value for key, value in vars(container).items() if key not in TABLES]
        return attributes + list(container._modules.values())
    if kind is types.FunctionType:
        cells, keywords = container.__closure__ or (), container.__kwdefaults__ or {}
        return [*map(_cell, cells), *(container.__defaults__ or ()), *keywords.values()]
    if kind is functools.partial:
        return [container.func, *container.args, *container.keywords.values()]
    if kind is types.MethodType:
        return (container.__self__,)
    return getattr(container, "__dict__", {}).values()


def holds_state(value: Any) -> bool:
    """Whether an object may hold state of a kernel."""
    kind = _kind(value)
    if kind is types.FunctionType:
        return bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    return kind is not _NOTHING


_IMMUTABLE = (tuple, functools.partial, types.MethodType)


def held_containers(
    modules: Iterable[torch.nn.Module],
    fixed: Collection[int] = frozenset(),
    shared: Collection[int] = frozenset(),
) -> list[Any]:
    """Return modules and the containers that they hold, at any depth, but for those of identities ``fixed`` or ``shared``."""
    found: list[Any] = []
    known = _known  # the innermost loop of an update: no call for a value that holds nothing
    stack = [(module, 0) for module in modules]
    seen = {id(module) for module, _ in stack}
    while stack:
        container, depth = stack.pop()
        found.append(container)
        if depth == _DEPTH:
            continue
        for value in children(container):
            kind = known[type(value)] if type(value) in known else _find_kind(value)
            if kind is _NOTHING:
                continue
            identity = id(value)
            if identity in seen or identity in fixed or identity in shared:
                continue
            if kind is dict and not value:
                seen.add(identity)
                found.append(value)
            elif holds_state(value):
                seen.add(identity)
                stack.append((value, depth + 1))
    return found


def held_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that a model's modules hold beside their parameters and buffers, at any depth."""
    for container in held_containers(model.modules()):
        yield from (value for value in children(container) if isinstance(value, torch.Tensor))


class LayerState:
    """Find the containers that belong to one layer alone.

    Args:
        layers: groups of modules treated as one layer each.
        fixed: modules that no layer owns: those that are layers of their own, and those above them.
    """

    def __init__(self, layers: list[list[torch.nn.Module]], fixed: Iterable[torch.nn.Module]) -> None:
        self.set_fixed(fixed)
        self._shared: dict[int, Any] = {}  # holds the containers: no identity is used again
        self.find_shared(layers)

    def set_fixed(self, modules: Iterable[torch.nn.Module]) -> None:
        """Set which modules no layer owns."""
        self._fixed = {id(module) for module in modules}

    def find_shared(self, layers: list[list[torch.nn.Module]]) -> None:
        """Search for what several layers share; what was found shared before stays so."""
        first: dict[int, int] = {}
        for index, modules in enumerate(layers):
            for container in held_containers(modules, self._fixed, self._shared):
                if first.setdefault(id(container), index) != index:
                    self._shared[id(container)] = container

    def capture(self, modules: list[torch.nn.Module]) -> Snapshot:
        """Copy the contents of all containers of ``modules``."""
        snapshot = Snapshot()
        for container in held_containers(modules, self._fixed, self._shared):
            if container.__class__ in _DICTIONARIES and not container:
                snapshot.contents[id(container)] = (container, {})
            elif _kind(container) not in _IMMUTABLE:
                snapshot.add(container)
        return snapshot
