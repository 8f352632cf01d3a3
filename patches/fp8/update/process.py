"""Post-process a layer's fresh values, and write what came of it into the objects the engine runs on, in place.

Kernels keep derived state in attributes of the layer, of its quantization method, of kernel objects below that, in the cells
of closures, in lists and dictionaries. A *container* is any of these. `LayerState` finds those that belong to one layer
alone; a `Snapshot` copies their contents and restores them. What post-processing made or changed is found by comparing
snapshots; a `Plan` pairs it with the live state: tensors are copied into their existing storage (captured graphs keep their
addresses), containers are entered, plain values replaced. An object with a finaliser (a handle to packed weights) exchanges
its contents with its counterpart, so that each resource keeps one owner. Nothing is changed until `Plan.apply`; a pair that
cannot be matched is found before."""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from flashpatch.patches.fp8.update.tensors import WriteLog

_DEPTH = 8
_FOREIGN = tuple(
    "torch. transformers. vllm.config. enum. logging. threading. re. pathlib. flashpatch.".split()
)
NUMBERS = (str, bytes, int, float)
_PLAIN = (*NUMBERS, bool, type(None))
_LEAVES = (*_PLAIN, complex, type, torch.Tensor, torch.dtype, torch.device, types.ModuleType, type(len))
_DICTIONARIES = (dict, OrderedDict)  # most are empty tables of hooks, for which no further call is made

TABLES = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))
"""A module's own tables, beside its ordinary attributes."""


_BASES = (types.FunctionType, functools.partial, types.MethodType, dict, tuple, list, set, torch.nn.Module)
_NOTHING = types.NoneType
_known: dict[type, type] = {}  # a model has a million values of some hundred types


def _find_kind(value: Any) -> type:
    """What a value is to a walk over containers: one of `_BASES`, ``object``, or `_NOTHING` if it holds no state; kept for its
    type, unless values of that type may pass for those of another."""
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

    def with_tables_of(self, modules: Iterable[torch.nn.Module]) -> Snapshot:
        """Return this snapshot as it is after `restore`, when some modules' parameters and buffers were set anew."""
        snapshot = Snapshot()
        snapshot.contents = self.contents.copy()
        for module in modules:
            snapshot.contents[id(module)] = (module, read_container(module))
        return snapshot

    def holds(self, free: Iterable[torch.nn.Module] = ()) -> bool:
        """Whether every container holds just what it held; of ``free`` modules, the mode and the values of parameters aside."""
        free = set(map(id, free))
        known = _known  # as below: few calls, twice for each layer of an update
        for identity, (container, contents) in self.contents.items():
            cls, is_free = type(container), identity in free
            if cls in _DICTIONARIES and not (container or contents):
                continue
            kind = known[cls] if cls in known else _find_kind(container)
            is_module = kind is torch.nn.Module
            now = container.__dict__ if is_module or kind is object else read_container(container)
            if not _same(now, contents, is_module, is_free):
                return False
            if is_free and now["_parameters"].keys() != contents["_parameters"].keys():
                return False
        return True

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that the containers held directly."""
        for _, contents in self.contents.values():
            values = contents.values() if isinstance(contents, dict) else contents
            yield from (value for value in values if isinstance(value, torch.Tensor))

    def module_tensors(self) -> list[torch.Tensor]:
        """Return the parameters and tensor attributes of the modules."""
        found = []
        for container, contents in self.contents.values():
            if isinstance(container, torch.nn.Module):
                found += [t for t in contents["_parameters"].values() if t is not None]
                found += [v for v in contents.values() if isinstance(v, torch.Tensor)]
        return found

    def restore(self) -> None:
        """Write every container's contents back, in place."""
        write_containers(self.contents.values())


def read_container(container: Any) -> Any:
    """Return a shallow copy of what ``container`` holds."""
    cls = type(container)
    kind = _known[cls] if cls in _known else _find_kind(container)
    if kind in _COPIED:
        return container.copy()
    if kind is types.FunctionType:
        return list(children(container))
    contents = vars(container).copy()
    if kind is torch.nn.Module:
        for table in TABLES:
            contents[table] = contents[table].copy()
    return contents


def _same(now: Any, before: Any, is_module: bool = False, is_free: bool = False) -> bool:
    """Whether two results of `read_container` are the same objects under the same keys."""
    if not isinstance(before, dict):
        return len(now) == len(before) and all(map(operator.is_, now, before))
    if now.keys() != before.keys():
        return False
    for key in before:
        if now[key] is before[key] or (is_free and key in ("_parameters", "training")):
            continue
        if not (is_module and key in TABLES):
            return False
        if (now[key] or before[key]) and not _same(now[key], before[key]):
            return False
    return True


def write_containers(held: Iterable[tuple[Any, Any]]) -> None:
    """Write what `read_container` returned of each back; a container, and a module's own tables, keep their identity."""
    for container, contents in held:
        cls = type(container)
        if cls in _DICTIONARIES and not (contents or container):
            continue
        kind = _known[cls] if cls in _known else _find_kind(container)
        if kind in (dict, set):
            container.clear()
            container.update(contents)
        elif kind is types.FunctionType:
            _write_function(container, contents)
        elif kind is list:
            container[:] = contents
        else:
            state = container.__dict__
            kept = {table: state[table] for table in TABLES} if kind is torch.nn.Module else {}
            for key, live in kept.items():
                if live or contents[key]:
                    live.clear()
                    live.update(contents[key])
            state.clear()
            state.update(contents)
            state.update(kept)


def _write_function(function: types.FunctionType, contents: Iterable[Any]) -> None:
    values = iter(contents)
    for cell in function.__closure__ or ():
        if (value := next(values)) is not ABSENT:
            cell.cell_contents = value
    if function.__defaults__:
        function.__defaults__ = tuple(next(values) for _ in function.__defaults__)
    for key in function.__kwdefaults__ or ():
        function.__kwdefaults__[key] = next(values)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def children(container: Any) -> Iterable[Any]:
    """Return the values directly held by ``container``."""
    cls = type(container)
    kind = _known[cls] if cls in _known else _find_kind(container)
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
    kind = _known.get(type(value)) or _find_kind(value)
    if kind is types.FunctionType:
        return bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    return kind is not _NOTHING


_COPIED, _IMMUTABLE = (dict, list, set), (tuple, functools.partial, types.MethodType)


def held_containers(
    modules: Iterable[torch.nn.Module],
    fixed: Collection[int] = frozenset(),
    shared: Collection[int] = frozenset(),
) -> list[Any]:
    """Return modules and the containers that they hold, at any depth, but for those of identities ``fixed`` or ``shared``."""
    found: list[Any] = []
    known = _known  # the innermost loop of an update: no call for a value that holds nothing
    stack = [(module, torch.nn.Module, 0) for module in modules]
    seen = {id(module) for module, _, _ in stack}
    while stack:
        container, kind, depth = stack.pop()
        found.append(container)
        if depth == _DEPTH:
            continue
        if kind is object:
            values = container.__dict__.values()
        else:
            values = container if kind in (list, tuple) else children(container)
        for value in values:
            kind = known[type(value)] if type(value) in known else _find_kind(value)
            if kind is _NOTHING:
                continue
            identity = id(value)
            if identity in seen or identity in fixed or identity in shared:
                continue
            if kind is dict and not value:
                seen.add(identity)
                found.append(value)
            elif kind is not types.FunctionType or holds_state(value):
                seen.add(identity)
                stack.append((value, kind, depth + 1))
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

    Attributes:
        shared: containers of several layers, by identity."""

    def __init__(self, layers: list[list[torch.nn.Module]], fixed: Iterable[torch.nn.Module]) -> None:
        self.set_fixed(fixed)
        self.shared: dict[int, Any] = {}  # holds the containers: no identity is used again
        self.find_shared(layers)

    def set_fixed(self, modules: Iterable[torch.nn.Module]) -> None:
        """Set which modules no layer owns."""
        self._fixed = {id(module) for module in modules}

    def find_shared(self, layers: list[list[torch.nn.Module]]) -> None:
        """Search for what several layers share; what was found shared before stays so."""
        first: dict[int, int] = {}
        for index, modules in enumerate(layers):
            for container in held_containers(modules, self._fixed, self.shared):
                if first.setdefault(id(container), index) != index:
                    self.shared[id(container)] = container

    def capture(self, modules: list[torch.nn.Module]) -> Snapshot:
        """Copy the contents of all containers of ``modules``."""
        snapshot = Snapshot()
        for container in held_containers(modules, self._fixed, self.shared):
            kind = _known.get(container.__class__)
            if kind is object or kind in _COPIED:  # as `read_container`, without a call
                held = container.__dict__ if kind is object else container
                snapshot.contents[id(container)] = (container, held.copy())
            elif not isinstance(container, _IMMUTABLE):
                snapshot.contents[id(container)] = (container, read_container(container))
        return snapshot


ABSENT = object()
"""What a place holds that does not exist, and an empty cell of a closure."""


def table(container: Any) -> dict:
    """Return a dictionary itself, of another object its attributes."""
    return container if isinstance(container, dict) else vars(container)


def get(container: Any, key: str) -> Any:
    """Return what a place holds, or `ABSENT`."""
    return table(container).get(key, ABSENT)


def put(container: Any, key: str, value: Any) -> None:
    """Make a place hold ``value``; `ABSENT` removes it."""
    _put(table(container), key, value)


def tensors_below(value: Any, depth: int = 4, apart: Collection[int] = frozenset()) -> Iterator[torch.Tensor]:
    """Yield the tensors that a value is or holds, except through objects whose identity is in ``apart``."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and id(value) not in apart and holds_state(value):
        for child in children(value):
            yield from tensors_below(child, depth - 1, apart)


class Derived:
    """Keys that post-processing has set, by the container or tensor in use that holds them."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[int, str], tuple[Callable[[], Any], frozenset[str]]] = {}

    def keys(self, container: Any, table: str = "") -> frozenset[str]:
        """Return the keys among a container's attributes, or in its ``table``."""
        held, keys = self.by_place.get((id(container), table), (None, frozenset()))
        return keys if held is not None and held() is container else frozenset()

    def note(self, container: Any, keys: Collection[str], table: str = "") -> None:
        """Note that post-processing has set ``keys``."""
        if keys:
            self.by_place[id(container), table] = _reference(container), frozenset(keys)

    def take(self, other: Derived) -> Callable[[], None]:
        """Become equal to ``other``; return how that is undone."""
        before, self.by_place = self.by_place, other.by_place
        return functools.partial(setattr, self, "by_place", before)

    def learn(self, now: Snapshot, before: Snapshot, attributes: Mapping[tuple[int, str], dict]) -> None:
        """Note what the first load and its post-processing have set.

        Args:
            now: the layer's state.
            before: the same as its constructor left it, without tensors.
            attributes: what the constructor's parameters and buffers carried, by module and key."""
        for identity, (container, contents) in now.contents.items():
            old = before.contents.get(identity, (None, {}))[1]
            for table, held, known in tables(container, contents, old):
                self.note(container, [k for k, v in held.items() if v is not known.get(k, ABSENT)], table)
                for key, value in held.items():
                    if isinstance(value, torch.Tensor):
                        self.note(value, set_on(value, attributes.get((id(container), key), {})))


def set_on(tensor: torch.Tensor, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a tensor carries beside its values that is not as ``before``, without loaders, which serve loads alone."""
    carried = vars(tensor).items()
    return {
        key: value for key, value in carried if value is not before.get(key, ABSENT) and not callable(value)
    }


def tables(container: Any, contents: Any, old: Any) -> list[tuple[str, dict, dict]]:
    """Return each table of a container, now and before: a module's registered ones have names."""
    if not isinstance(contents, dict):
        return []
    named = []
    if isinstance(container, torch.nn.Module):
        names = ("_parameters", "_buffers", "_modules")
        named = [(table, contents[table], old.get(table, {})) for table in names]
        contents = {key: value for key, value in contents.items() if key not in TABLES}
        old = {key: value for key, value in old.items() if key not in TABLES}
    return [*named, ("", contents, old)]


def _reference(container: Any) -> Callable[[], Any]:
    """Refer to a container, without keeping it alive if that can be."""
    try:
        return weakref.ref(container)
    except TypeError:  # a dictionary
        return lambda: container


class LayoutChanged(RuntimeError):
    """A fresh tensor does not fit the storage in use."""


Undo = Callable[[], None]


class Plan:
    """Steps that make live state equal to fresh state in place.

    Args:
        known: what the last post-processing has set; when the plan is carried out, what this one has.
        attributes: what staged tensors carry before post-processing, by identity.
        compiled: graphs or compiled code read the tensors in use, so none may come or go."""

    def __init__(
        self,
        known: Derived | None = None,
        attributes: Mapping[int, dict[str, Any]] | None = None,
        compiled: bool = False,
    ) -> None:
        self.known = Derived() if known is None else known
        self.derived = Derived()
        self._attributes = attributes or {}
        self._compiled = compiled
        # By identity, which is no other tensor's as long as this one is held.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor, str]] = {}
        self._steps: list[Callable[[], Undo]] = []  # each returns how it is undone
        self._pairs: dict[int, Any] = {}
        self.spared: list[tuple[torch.Tensor, torch.Tensor, str]] = []  # as of `copies`, see `spare`
        self.owns_resources = False
        self.fresh: frozenset[int] = frozenset()  # identities of the fresh values' tensors
        self.tables: list[tuple[dict, dict]] = []  # of modules, and what they held when this was planned
        self._steps.append(functools.partial(self.known.take, self.derived))

    def pair(self, live: Any, fresh: Any, where: str) -> Any:
        """Plan to make ``live`` equal ``fresh``; returns the object to keep in its place."""
        if live is fresh:
            return live
        if id(live) in self._pairs and not isinstance(live, (torch.Tensor, *_PLAIN)):
            return self._pairs[id(live)]
        if isinstance(live, torch.Tensor) and isinstance(fresh, torch.Tensor):
            self._tensor(live, fresh, where)
            self._tensor_attributes(live, fresh, where)
            return live
        if live is None or fresh is None:
            self.come_or_go(fresh if live is None else live, where)
        if type(live) is not type(fresh) or not holds_state(live):
            return fresh
        if isinstance(live, types.FunctionType) and live.__code__ is not fresh.__code__:
            return fresh
        self._pairs[id(live)] = live
        if isinstance(live, (tuple, functools.partial, types.MethodType)):
            kept = self._pairs[id(live)] = self._immutable(live, fresh, where)
            return kept
        if hasattr(type(live), "__del__"):
            self.owns_resources = True
            keys = vars(fresh).keys() | self.known.keys(live)
            self.derived.note(live, vars(fresh))
            self._steps.append(functools.partial(_swap, live, fresh, keys))
            return live
        before, after = read_container(live), read_container(fresh)
        self.contents(live, before, after, where)
        return live

    def contents(self, container: Any, live: Any, fresh: Any, where: str) -> None:
        """Plan to bring ``container``, holding ``live``, to hold the equivalent of ``fresh``."""
        if isinstance(live, dict):
            merged = self._merged(container, "", live, fresh, where)
        elif isinstance(live, list) and len(live) == len(fresh):
            merged = [self.pair(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(live, fresh))]
        else:
            _refuse_tensors(live, fresh, where)
            merged = fresh

        def carry_out() -> Undo:
            before = read_container(container)
            write_containers([(container, merged)])
            return lambda: write_containers([(container, before)])

        self._steps.append(carry_out)

    def _merged(self, container: Any, name: str, live: dict, fresh: dict, where: str) -> dict:
        """Return what a container, or its table ``name``, holds in the end."""
        last = self.known.keys(container, name)
        self.derived.note(container, fresh, name)
        merged = {key: value for key, value in live.items() if key in fresh or key not in last}
        for key in live.keys() - merged.keys():
            self.come_or_go(live[key], f"{where}.{key}")
        for key, value in fresh.items():
            if isinstance(container, torch.nn.Module) and isinstance(value, dict) and key in TABLES:
                value = self._merged(container, key, live[key], value, where)
            elif key in live:
                value = self.pair(live[key], value, f"{where}.{key}")
            else:
                self.come_or_go(value, f"{where}.{key}")
            merged[key] = value
        return merged

    def assign(self, state: dict, key: str, value: Any) -> None:
        """Plan ``state[key] = value``; `ABSENT` removes the key."""
        self._steps.append(functools.partial(_put, state, key, value))

    def drop(self, state: dict, key: str, where: str) -> None:
        """Plan to remove what the last post-processing had set and this one has not."""
        self.come_or_go(state[key], where)
        self.assign(state, key, ABSENT)

    def come_or_go(self, value: Any, where: str) -> None:
        """Note what exists with some weights only.

        Raises:
            LayoutChanged: graphs or compiled code run with its tensors, or without them, for ever."""
        if self._compiled and any(True for _ in tensors_below(value)):
            raise LayoutChanged(
                f"{where} exists with some weights only, and the engine runs graphs or compiled code"
            )

    def spare(self, storages: Collection[int]) -> None:
        """Do not write to some storages."""
        self.spared = [one for one in self.copies() if one[0].untyped_storage()._cdata in storages]
        for live, _, _ in self.spared:
            del self._copies[id(live)]

    def hold_back(self, log: WriteLog) -> None:
        """Undo what post-processing has written into live tensors, and plan to write it again."""
        written = {id(tensor): (tensor, tensor.clone()) for tensor, _ in log.writes}
        log.undo()
        for identity, (tensor, fresh) in written.items():
            self._copies.setdefault(identity, (tensor, fresh, "a tensor that is no parameter"))

    def copies(self) -> Collection[tuple[torch.Tensor, torch.Tensor, str]]:
        """Return each tensor in use, the fresh one that is copied into it, and its name."""
        return self._copies.values()

    def replaced(self) -> list[str]:
        """Return the keys of `tables` under which another tensor is now than the one that is copied into."""
        held = [(now, key, one) for now, then in self.tables for key, one in then.items()]
        gone = [(key, one) for now, key, one in held if now.get(key) is not one]
        return [key for key, one in gone if id(one) in self._copies or _inner_tensors(one)]

    def apply(self, undo: list[Undo] | None = None) -> None:
        """Carry the plan out. Only copies and assignments remain, which cannot fail for want of a match.

        Args:
            undo: receives the steps back, to be run in reverse order. Then the plan lets go of the fresh values, so
                that old and fresh values are never held twice."""
        while self._copies:
            _, (held, fresh, _) = self._copies.popitem()
            live = held.detach()
            if undo is not None:
                undo.append(functools.partial(live.copy_, live.clone()))
            live.copy_(fresh)
        for step in self._steps:
            back = step()
            if undo is not None:
                undo.append(back)
        self._steps.clear()

    def _tensor(self, live: torch.Tensor, fresh: torch.Tensor, where: str) -> torch.Tensor:
        inner = _inner_tensors(live) if hasattr(live, "__tensor_flatten__") else []
        if inner and inner == _inner_tensors(fresh):
            for name in inner:
                self._tensor(getattr(live, name), getattr(fresh, name), f"{where}.{name}")
            return live
        if live.shape != fresh.shape or live.dtype != fresh.dtype or live.device != fresh.device:
            raise LayoutChanged(
                f"{where}: a fresh load gives {_describe(fresh)}, the engine runs on {_describe(live)}"
            )
        if live.numel() == 0 or (live.data_ptr() == fresh.data_ptr() and live.stride() == fresh.stride()):
            return live
        for dim, step in enumerate(live.stride()):
            if step == 0 and live.shape[dim] > 1:  # expanded: one element stands for all along this dimension
                first = fresh.narrow(dim, 0, 1)
                if not torch.equal(first.expand_as(fresh), fresh):
                    raise LayoutChanged(
                        f"{where}: one value stood for {live.shape[dim]}, a fresh load gives several"
                    )
                self._tensor(live.narrow(dim, 0, 1), first, where)
                return live
        known = self._copies.get(id(live))
        if known is not None and known[1].data_ptr() != fresh.data_ptr() and not torch.equal(known[1], fresh):
            raise LayoutChanged(f"{where} and {known[2]} share one tensor but were given different values")
        self._copies[id(live)] = (live, fresh.detach(), where)
        return live

    def _tensor_attributes(self, live: torch.Tensor, fresh: torch.Tensor, where: str) -> None:
        """Plan what a tensor carries beside its values, such as a number that kernels read from it."""
        mine, theirs = vars(live), vars(fresh)
        if hasattr(live, "__tensor_flatten__") or hasattr(fresh, "__tensor_flatten__"):
            context, other = _plain_context(live), _plain_context(fresh)
            if hidden := [key for key in other if key not in theirs and context.get(key) != other[key]]:
                raise LayoutChanged(
                    f"{where}: {type(live).__name__} has another {hidden[0]} with a fresh load"
                )
        if not mine and not theirs:
            return
        last, inner = self.known.keys(live), _inner_tensors(live)
        changed = {key: theirs[key] for key in last & theirs.keys()}
        changed |= set_on(fresh, self._attributes.get(id(fresh), {}))
        self.derived.note(live, changed)
        for key, value in changed.items():
            if key not in inner:
                value = self.pair(mine.get(key), value, f"{where}.{key}")
                self.assign(mine, key, value)
        for key in (last & mine.keys()) - theirs.keys():
            self.drop(mine, key, f"{where}.{key}")

    def _immutable(self, live: Any, fresh: Any, where: str) -> Any:
        """A tuple, partial or bound method: the live one, or a new one around what could be kept of it."""
        if isinstance(live, types.MethodType):
            owner = self.pair(live.__self__, fresh.__self__, where)
            same = owner is live.__self__ and live.__func__ is fresh.__func__
            return live if same else types.MethodType(fresh.__func__, owner)
        old, new = list(children(live)), list(children(fresh))
        mine, theirs = (getattr(one, "keywords", {}).keys() for one in (live, fresh))
        if len(old) != len(new) or mine != theirs:
            _refuse_tensors(old, new, where)
            return fresh
        if isinstance(live, functools.partial):
            old = [live.func, *live.args, *(live.keywords[key] for key in fresh.keywords)]
        kept = [self.pair(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(old, new))]
        if all(a is b for a, b in zip(old, kept)):
            return live
        if isinstance(live, functools.partial):
            split = 1 + len(fresh.args)
            return functools.partial(*kept[:split], **dict(zip(fresh.keywords, kept[split:])))
        return live._make(kept) if hasattr(live, "_make") else type(live)(kept)


def _put(state: dict, key: str, value: Any) -> Undo:
    before = state.get(key, ABSENT)
    if value is ABSENT:
        state.pop(key, None)
    else:
        state[key] = value
    return functools.partial(_put, state, key, before)


def _swap(live: Any, fresh: Any, keys: Collection[str]) -> Undo:
    """Exchange what two objects hold. What it returns is no closure: one that held itself would keep both alive."""
    for key in keys:
        a, b = get(live, key), get(fresh, key)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
            held = a.clone()
            a.copy_(b)
            b.copy_(held)
        else:
            put(live, key, b)
            put(fresh, key, a)
    return functools.partial(_swap, live, fresh, keys)


def _refuse_tensors(live: Any, fresh: Any, where: str) -> None:
    """Containers of unlike lengths cannot be paired; snapshot graphs would go on with the tensors in use."""
    if any(isinstance(value, torch.Tensor) for value in live):
        raise LayoutChanged(
            f"{where}: a fresh load gives {len(fresh)} values, the engine runs on {len(live)}"
        )


def _inner_tensors(tensor: torch.Tensor) -> list[str]:
    """Return the names of the tensors that a wrapper subclass is made of; none for an ordinary tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return list(flatten()[0]) if flatten is not None else []


def _plain_context(tensor: torch.Tensor) -> dict[Any, Any]:
    """Return the numbers and texts that a wrapper subclass keeps beside its tensors."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    context = flatten()[1] if flatten is not None else None
    values = context if isinstance(context, (dict, tuple, list)) else [context]
    named = values if isinstance(values, dict) else dict(enumerate(values))
    return {key: value for key, value in named.items() if isinstance(value, _PLAIN)}


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def compare(
    name: str,
    modules: list[torch.nn.Module],
    live: Snapshot,
    before: Snapshot,
    after: Snapshot,
    initial: Mapping[int, int],
    plan: Plan,
) -> None:
    """Plan to bring into a live layer what post-processing has made of fresh values.

    Args:
        name: of the layer, for errors.
        modules: of the layer; they are in their live state again.
        live: their state in the running engine.
        before: their state with fresh values, before post-processing.
        after: the same after post-processing.
        initial: identity of buffers that were shown at their initial values -> writes to them before.
        plan: without steps yet.

    Raises:
        LayoutChanged: the values do not fit the storage in use."""

    def unwritten(value: Any) -> bool:
        """Whether a value is such a buffer, and the post-processing did not write to it."""
        return id(value) in initial and initial[id(value)] == value._version

    def pair_into(container: Any, key_table: str, old: dict, fresh: dict, running: dict) -> None:
        """Plan a container's attributes, or one of its tables: what has changed, and what is gone."""
        attributes = container if isinstance(container, dict) else container.__dict__
        state = attributes[key_table] if key_table else attributes
        last = plan.known.keys(container, key_table)
        if key_table:
            changed = {k: v for k, v in fresh.items() if v is not running.get(k) and not unwritten(v)}
        else:
            changed = {k: v for k, v in fresh.items() if k in last or v is not old.get(k, ABSENT)}
        where = name if container in modules else f"{name}:{type(container).__name__}"
        for key, value in changed.items():
            if running.get(key) is not None:
                value = plan.pair(running[key], value, f"{where}.{key}")
            elif value is None:
                continue
            else:
                plan.come_or_go(value, f"{where}.{key}")
            if not key_table or value is not running.get(key):  # see `Plan.replaced`
                plan.assign(state, key, value)
        if derived := [k for k, v in fresh.items() if v is not old.get(k, ABSENT)]:
            plan.derived.note(container, derived, key_table)
        for key in running.keys() & (old.keys() | last) - fresh.keys() - TABLES:
            plan.drop(state, key, f"{where}.{key}")
        for key, value in fresh.items():
            if value is None and isinstance(running.get(key), float):
                plan.assign(state, key, None)  # a forward derived it from what is old now, and does so again

    for identity, (container, fresh) in after.contents.items():
        if identity not in before.contents or identity not in live.contents:
            continue  # made by the post-processing: reached through the attribute that holds it
        old, running = before.contents[identity][1], live.contents[identity][1]
        if not (fresh or running):
            continue  # most are empty tables of hooks
        if isinstance(fresh, dict):
            for one, now, was in tables(container, fresh, old):
                used = running[one] if one else running
                if now or used:
                    pair_into(container, one, was, now, used)
        elif len(old) != len(fresh) or not all(map(operator.is_, old, fresh)):
            plan.contents(container, running, fresh, name)
