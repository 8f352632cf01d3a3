"""Compare freshly processed values with the live layer, and write them into the objects the engine runs on.

`compare` finds what the post-processing of a layer has made or changed, by its Python state before and after.
A `Plan` pairs that with the live state and works out how to make the live one equal *in place*: tensors are copied
into their existing storage (captured graphs keep their addresses), containers are entered, plain values replaced.
An object that owns a resource outside Python's sight (it has a finaliser, as a handle to packed weights has)
exchanges its contents with its counterpart, so that each resource keeps exactly one owner and the old one is
released with the fresh object. Nothing is changed until `Plan.apply`; a pair that cannot be matched is found before.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashpatch.patches.fp8.refit import layer_state
from flashpatch.patches.fp8.refit.layer_state import Snapshot
from flashpatch.patches.fp8.refit.write_log import WriteLog


class LayoutChanged(RuntimeError):
    """A fresh tensor does not fit the storage in use."""


Undo = Callable[[], None]


class Plan:
    """Steps that make live state equal to fresh state in place."""

    def __init__(self) -> None:
        # By identity, which is no other tensor's as long as this one is held.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor, str]] = {}
        self._steps: list[Callable[[], Undo]] = []  # each returns how it is undone
        self._pairs: dict[int, Any] = {}
        self.owns_resources = False
        self.fresh: frozenset[int] = frozenset()  # identities of the fresh values' tensors

    def pair(self, live: Any, fresh: Any, where: str) -> Any:
        """Plan to make ``live`` equal ``fresh``; returns the object to keep in its place."""
        if live is fresh:
            return live
        if id(live) in self._pairs and not isinstance(live, (torch.Tensor, *_PLAIN)):
            return self._pairs[id(live)]
        if isinstance(live, torch.Tensor) and isinstance(fresh, torch.Tensor):
            return self._tensor(live, fresh, where)
        if type(live) is not type(fresh) or not layer_state.holds_state(live):
            return fresh
        if isinstance(live, types.FunctionType) and live.__code__ is not fresh.__code__:
            return fresh
        self._pairs[id(live)] = live
        if isinstance(live, (tuple, functools.partial, types.MethodType)):
            kept = self._pairs[id(live)] = self._immutable(live, fresh, where)
            return kept
        if hasattr(type(live), "__del__"):
            self._exchange(live, fresh)
            return live
        before, after = layer_state.read(live), layer_state.read(fresh)
        self.contents(live, before, after, where)
        return live

    def contents(self, container: Any, live: Any, fresh: Any, where: str) -> None:
        """Plan to bring ``container``, holding ``live``, to hold the equivalent of ``fresh``."""
        if isinstance(live, dict):
            merged = {
                key: self.pair(live[key], value, f"{where}.{key}") if key in live else value
                for key, value in fresh.items()
            }
            merged = {**live, **merged}
        elif isinstance(live, list) and len(live) == len(fresh):
            merged = [self.pair(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(live, fresh))]
        else:
            _refuse_tensors(live, fresh, where)
            merged = fresh

        def write() -> Undo:
            before = layer_state.read(container)
            layer_state.write(container, merged)
            return lambda: layer_state.write(container, before)

        self._steps.append(write)

    def assign(self, state: dict, key: str, value: Any) -> None:
        """Plan ``state[key] = value``."""

        def assign() -> Undo:
            before = state.get(key, _ABSENT)
            state[key] = value
            return lambda: state.pop(key) if before is _ABSENT else state.__setitem__(key, before)

        self._steps.append(assign)

    def replace(self, items: list, new: list) -> None:
        """Plan to replace what a list holds."""

        def replace() -> Undo:
            before = items.copy()
            items[:] = new
            return lambda: items.__setitem__(slice(None), before)

        self._steps.append(replace)

    def hold_back(self, log: WriteLog) -> None:
        """Undo what post-processing has written into live tensors, and plan to write it again."""
        written = {id(tensor): (tensor, tensor.clone()) for tensor, _ in log.writes}
        log.undo()
        for identity, (tensor, fresh) in written.items():
            self._copies.setdefault(identity, (tensor, fresh, "a tensor that is no parameter"))

    def copies(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, str]]:
        """Yield each tensor in use, the fresh one that is copied into it, and its name."""
        yield from self._copies.values()

    def apply(self, undo: list[Undo] | None = None) -> None:
        """Carry the plan out. Only copies and assignments remain, which cannot fail for want of a match.

        Args:
            undo: receives the steps back, to be run in reverse order. Then the plan lets go of the fresh values, so
                that old and fresh values are never held twice.
        """
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
        inner = _inner_tensors(live)
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

    def _immutable(self, live: Any, fresh: Any, where: str) -> Any:
        """A tuple, partial or bound method: the live one, or a new one around what could be kept of it."""
        if isinstance(live, types.MethodType):
            owner = self.pair(live.__self__, fresh.__self__, where)
            same = owner is live.__self__ and live.__func__ is fresh.__func__
            return live if same else types.MethodType(fresh.__func__, owner)
        old, new = list(layer_state.children(live)), list(layer_state.children(fresh))
        if (
            len(old) != len(new)
            or getattr(live, "keywords", {}).keys() != getattr(fresh, "keywords", {}).keys()
        ):
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

    def _exchange(self, live: Any, fresh: Any) -> None:
        self.owns_resources = True
        self._steps.append(functools.partial(_swap, live, fresh))


def _swap(live: Any, fresh: Any) -> Undo:
    """Exchange what two objects hold. What it returns is no closure: one that held itself would keep both alive."""
    mine, theirs = vars(live), vars(fresh)
    for key in mine.keys() & theirs.keys():
        a, b = mine[key], theirs[key]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
            held = a.clone()
            a.copy_(b)
            b.copy_(held)
        else:
            mine[key], theirs[key] = b, a
    return functools.partial(_swap, live, fresh)


class InitialBuffers:
    """Buffers that a layer shows at their initial values while it is processed."""

    def __init__(self) -> None:
        self._writes: dict[int, int] = {}  # id of a buffer -> number of writes to it so far

    def add(self, buffer: torch.Tensor) -> torch.Tensor:
        """Note a buffer that is about to be shown; return it."""
        self._writes[id(buffer)] = 0 if buffer.is_inference() else buffer._version
        return buffer

    def unwritten(self, value: Any) -> bool:
        """Whether ``value`` is one of the buffers, and the post-processing did not write to it."""
        if (
            id(value) not in self._writes or value.is_inference()
        ):  # writes to inference tensors are not counted
            return False
        return self._writes[id(value)] == value._version


def compare(
    name: str,
    modules: list[torch.nn.Module],
    live: Snapshot,
    before: Snapshot,
    after: Snapshot,
    initial: InitialBuffers,
    kept_alive: list[torch.Tensor],
) -> Plan:
    """Plan to bring into a live layer what post-processing has made of fresh values.

    Args:
        name: of the layer, for errors.
        modules: of the layer; they are in their live state again.
        live: their state in the running engine.
        before: their state with fresh values, before post-processing.
        after: the same after post-processing.
        initial: buffers that were shown at their initial values.
        kept_alive: when the plan is applied, its contents become the fresh tensors that a foreign resource may
            point into; hold them until the next update.

    Raises:
        LayoutChanged: the values do not fit the storage in use.
    """
    plan = Plan()

    def pair_into(state: dict, running: dict, changed: dict[str, Any], container: Any) -> None:
        if not changed:
            return
        where = name if container in modules else f"{name}:{type(container).__name__}"
        for key, value in changed.items():
            if key in running and running[key] is not None:
                value = plan.pair(running[key], value, f"{where}.{key}")
            elif value is None:
                continue
            plan.assign(state, key, value)

    for identity, (container, fresh) in after.contents.items():
        if identity not in before.contents or identity not in live.contents:
            continue  # made by the post-processing: reached through the attribute that holds it
        if isinstance(fresh, dict) and not fresh:
            continue  # as most tables of hooks are
        old, running = before.contents[identity][1], live.contents[identity][1]
        own: frozenset[str] = frozenset()
        if isinstance(container, torch.nn.Module):
            own = layer_state.TABLES
            for table in ("_parameters", "_buffers", "_modules"):
                changed = {k: v for k, v in fresh[table].items() if v is not running[table].get(k)}
                changed = {k: v for k, v in changed.items() if not initial.unwritten(v)}
                pair_into(getattr(container, table), running[table], changed, container)
        if isinstance(fresh, dict):
            changed = {k: v for k, v in fresh.items() if v is not old.get(k, _ABSENT) and k not in own}
            state = container if isinstance(container, dict) else vars(container)
            pair_into(state, running, changed, container)
            for key, value in fresh.items():
                if value is None and isinstance(running.get(key), float):
                    plan.assign(
                        state, key, None
                    )  # derived in a forward from what is old now: the next one does it again
        elif any(a is not b for a, b in zip(old, fresh)) or len(old) != len(fresh):
            plan.contents(container, running, fresh, name)
    fresh_tensors = _tensors(after)
    plan.fresh = frozenset(map(id, fresh_tensors))
    plan.replace(kept_alive, fresh_tensors if plan.owns_resources else [])
    return plan


def _tensors(snapshot: Snapshot) -> list[torch.Tensor]:
    """The parameters and tensor attributes of a snapshot's modules."""
    found = []
    for container, contents in snapshot.contents.values():
        if isinstance(container, torch.nn.Module):
            found += [t for t in contents["_parameters"].values() if t is not None]
            found += [v for v in contents.values() if isinstance(v, torch.Tensor)]
    return found


def _refuse_tensors(live: Any, fresh: Any, where: str) -> None:
    """Containers of unlike lengths cannot be paired; snapshot graphs would go on with the tensors in use."""
    if any(isinstance(value, torch.Tensor) for value in live):
        raise LayoutChanged(
            f"{where}: a fresh load gives {len(fresh)} values, the engine runs on {len(live)}"
        )


_ABSENT = object()
_PLAIN = (str, bytes, int, float, bool, type(None))


def _inner_tensors(tensor: torch.Tensor) -> list[str]:
    """Return the names of the tensors that a wrapper subclass is made of; none for an ordinary tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return list(flatten()[0]) if flatten is not None else []


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
