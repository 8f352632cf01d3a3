"""Capture and restore the Python state that a layer owns besides its tensors.

Kernels keep derived state in many places: attributes of the layer, of its quantization method, of kernel
objects below that, in the cells of closures, in lists and dictionaries. A *container* is any of these. A
`LayerState` finds the containers that belong to one layer alone; `capture` copies their contents (one level each,
no tensor is copied) and `Snapshot.restore` writes them back into the same containers.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
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


TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""A module's own tables, beside its ordinary attributes."""


class Snapshot:
    """Contents of containers at one moment: ``id(container) -> (container, contents)``."""

    def __init__(self) -> None:
        self.contents: dict[int, tuple[Any, Any]] = {}

    def add(self, container: Any) -> None:
        """Copy what ``container`` holds."""
        self.contents[id(container)] = (container, read(container))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that the containers held directly."""
        for _, contents in self.contents.values():
            values = contents.values() if isinstance(contents, dict) else contents
            yield from (value for value in values if isinstance(value, torch.Tensor))

    def restore(self) -> None:
        """Write every container's contents back, in place."""
        for container, contents in self.contents.values():
            write(container, contents)


def read(container: Any) -> Any:
    """Return a shallow copy of what ``container`` holds."""
    if isinstance(container, types.FunctionType):
        return list(children(container))
    if isinstance(container, (dict, list, set)):
        return container.copy()
    contents = vars(container).copy()
    if isinstance(container, torch.nn.Module):
        contents.update((table, contents[table].copy()) for table in TABLES)
    return contents


def write(container: Any, contents: Any) -> None:
    """Write what `read` returned back; the container, and a module's own tables, keep their identity."""
    if isinstance(container, types.FunctionType):
        cells, defaults = container.__closure__ or (), container.__defaults__ or ()
        values = iter(contents)
        for cell in cells:
            if (value := next(values)) is not _EMPTY:
                cell.cell_contents = value
        if defaults:
            container.__defaults__ = tuple(next(values) for _ in defaults)
        for key in container.__kwdefaults__ or ():
            container.__kwdefaults__[key] = next(values)
    elif isinstance(container, list):
        container[:] = contents
    elif isinstance(container, (dict, set)):
        _replace(container, contents)
    elif isinstance(container, torch.nn.Module):
        state = vars(container)
        kept = {table: state[table] for table in TABLES}
        for key, live in kept.items():
            _replace(live, contents[key])
        _replace(state, {**contents, **kept})
    else:
        _replace(vars(container), contents)


def _replace(live: dict | set, contents: dict | set) -> None:
    live.clear()
    live.update(contents)


class _Empty:
    """Stands for a closure cell with nothing in it."""


_EMPTY = _Empty()


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def children(container: Any) -> Iterator[Any]:
    """Yield the values directly held by ``container``."""
    if isinstance(container, types.FunctionType):
        yield from (_cell(cell) for cell in container.__closure__ or ())
        yield from container.__defaults__ or ()
        yield from (container.__kwdefaults__ or {}).values()
    elif isinstance(container, functools.partial):
        yield from (container.func, *container.args, *container.keywords.values())
    elif isinstance(container, types.MethodType):
        yield container.__self__
    elif isinstance(container, dict):
        yield from container.values()
    elif isinstance(container, (list, tuple, set)):
        yield from container
    elif isinstance(container, torch.nn.Module):
        yield from (value for key, value in vars(container).items() if key not in TABLES)
        yield from container._modules.values()
    else:
        yield from getattr(container, "__dict__", {}).values()


def holds_state(value: Any) -> bool:
    """Whether an object may hold state of a kernel."""
    if isinstance(value, _LEAVES):
        return False
    if isinstance(value, types.FunctionType):
        return bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    if isinstance(value, (dict, list, tuple, set, functools.partial, types.MethodType)):
        return True
    if isinstance(value, torch.nn.Module):
        return True
    module = f"{type(value).__module__}."
    return hasattr(value, "__dict__") and not module.startswith(_FOREIGN)


def _mutable(value: Any) -> bool:
    return not isinstance(value, (tuple, functools.partial, types.MethodType))


def held_containers(model: torch.nn.Module) -> Iterator[Any]:
    """Yield a model's modules and the containers that they hold, at any depth."""
    modules = list(model.modules())
    seen = set(map(id, modules))
    stack = [(module, 0) for module in modules]
    while stack:
        container, depth = stack.pop()
        yield container
        for value in children(container):
            if depth < _DEPTH and id(value) not in seen and holds_state(value):
                seen.add(id(value))
                stack.append((value, depth + 1))


def held_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that a model's modules hold beside their parameters and buffers, at any depth."""
    for container in held_containers(model):
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
            for container in self._walk(modules):
                if first.setdefault(id(container), index) != index:
                    self._shared[id(container)] = container

    def containers(self, modules: list[torch.nn.Module]) -> Iterator[Any]:
        """Yield the containers that belong to ``modules``, the modules included."""
        return (c for c in self._walk(modules) if _mutable(c))

    def capture(self, modules: list[torch.nn.Module]) -> Snapshot:
        """Copy the contents of all containers of ``modules``."""
        snapshot = Snapshot()
        for container in self.containers(modules):
            snapshot.add(container)
        return snapshot

    def _walk(self, modules: list[torch.nn.Module]) -> Iterator[Any]:
        seen = {id(module) for module in modules}
        stack = [(module, 0) for module in modules]
        while stack:
            container, depth = stack.pop()
            yield container
            if depth == _DEPTH:
                continue
            for value in children(container):
                known = id(value) in seen or id(value) in self._fixed or id(value) in self._shared
                if not known and holds_state(value):
                    seen.add(id(value))
                    stack.append((value, depth + 1))
