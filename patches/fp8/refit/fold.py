"""Compare freshly processed values with the live layer, and write them into the objects the engine runs on.

A `Plan` pairs what the post-processing of a layer has made or changed with the live state, and works out how to make
the live one equal *in place*: tensors are copied into their existing storage (captured graphs keep their addresses),
containers are entered, plain values replaced.
An object that owns a resource outside Python's sight (it has a finaliser, as a handle to packed weights has)
exchanges its contents with its counterpart, so that each resource keeps exactly one owner and the old one is
released with the fresh object. Nothing is changed until `Plan.apply`; a pair that cannot be matched is found before.
What the last post-processing had set and this one does not set again goes, as a fresh load would not have it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from flashpatch.patches.fp8.refit import layer_state
from flashpatch.patches.fp8.refit.attributes import ABSENT, Derived, get, put, set_on, tensors_below
from flashpatch.patches.fp8.refit.write_tracker import WriteLog


class LayoutChanged(RuntimeError):
    """A fresh tensor does not fit the storage in use."""


Undo = Callable[[], None]


class Plan:
    """Steps that make live state equal to fresh state in place.

    Args:
        known: what the last post-processing has set; when the plan is carried out, what this one has.
        attributes: what staged tensors carry before post-processing, by identity.
        compiled: graphs or compiled code read the tensors in use, so none may come or go.
    """

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
        if type(live) is not type(fresh) or not layer_state.holds_state(live):
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
        before, after = layer_state.read(live), layer_state.read(fresh)
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

        def write() -> Undo:
            before = layer_state.read(container)
            layer_state.write(container, merged)
            return lambda: layer_state.write(container, before)

        self._steps.append(write)

    def _merged(self, container: Any, name: str, live: dict, fresh: dict, where: str) -> dict:
        """Return what a container, or its table ``name``, holds in the end."""
        last = self.known.keys(container, name)
        self.derived.note(container, fresh, name)
        merged = {key: value for key, value in live.items() if key in fresh or key not in last}
        for key in live.keys() - merged.keys():
            self.come_or_go(live[key], f"{where}.{key}")
        for key, value in fresh.items():
            if (
                isinstance(container, torch.nn.Module)
                and isinstance(value, dict)
                and key in layer_state.TABLES
            ):
                value = self._merged(container, key, live[key], value, where)
            elif key in live:
                value = self.pair(live[key], value, f"{where}.{key}")
            else:
                self.come_or_go(value, f"{where}.{key}")
            merged[key] = value
        return merged

    def assign(self, state: dict, key: str, value: Any) -> None:
        """Plan ``state[key] = value``; `ABSENT` removes the key."""

        def assign() -> Undo:
            before = state.get(key, ABSENT)
            put(state, key, value)
            return functools.partial(put, state, key, before)

        self._steps.append(assign)

    def drop(self, state: dict, key: str, where: str) -> None:
        """Plan to remove what the last post-processing had set and this one has not."""
        self.come_or_go(state[key], where)
        self.assign(state, key, ABSENT)

    def come_or_go(self, value: Any, where: str) -> None:
        """Note what exists with some weights only.

        Raises:
            LayoutChanged: graphs or compiled code run with its tensors, or without them, for ever.
        """
        if self._compiled and any(True for _ in tensors_below(value)):
            raise LayoutChanged(
                f"{where} exists with some weights only, and the engine runs graphs or compiled code"
            )

    def hold_back(self, log: WriteLog) -> None:
        """Undo what post-processing has written into live tensors, and plan to write it again."""
        written = {id(tensor): (tensor, tensor.clone()) for tensor, _ in log.writes}
        log.undo()
        for identity, (tensor, fresh) in written.items():
            self._copies.setdefault(identity, (tensor, fresh, "a tensor that is no parameter"))

    def copies(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, str]]:
        """Yield each tensor in use, the fresh one that is copied into it, and its name."""
        yield from self._copies.values()

    def replaced(self) -> list[str]:
        """Return the keys of `tables` under which another tensor is now than the one that is copied into."""
        held = [(now, key, one) for now, then in self.tables for key, one in then.items()]
        gone = [(key, one) for now, key, one in held if now.get(key) is not one]
        return [key for key, one in gone if id(one) in self._copies or _inner_tensors(one)]

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

    def _tensor_attributes(self, live: torch.Tensor, fresh: torch.Tensor, where: str) -> None:
        """Plan what a tensor carries beside its values, such as a number that kernels read from it."""
        mine, theirs = vars(live), vars(fresh)
        context, other = _plain_context(live), _plain_context(fresh)
        if hidden := [key for key in other if key not in theirs and context.get(key) != other[key]]:
            raise LayoutChanged(f"{where}: {type(live).__name__} has another {hidden[0]} with a fresh load")
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


_PLAIN = (str, bytes, int, float, bool, type(None))


def _inner_tensors(tensor: torch.Tensor) -> list[str]:
    """Return the names of the tensors that a wrapper subclass is made of; none for an ordinary tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return list(flatten()[0]) if flatten is not None else []


def _plain_context(tensor: torch.Tensor) -> dict[Any, Any]:
    """Return the numbers and texts that a wrapper subclass keeps beside its tensors."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    context = flatten()[1] if flatten is not None else None
    named = (
        context
        if isinstance(context, dict)
        else dict(enumerate(context if isinstance(context, (tuple, list)) else [context]))
    )
    return {key: value for key, value in named.items() if isinstance(value, _PLAIN)}


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
