"""Find out what a call has set on the objects of a model."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from flashpatch.patches.fp8.refit import layer_state
from flashpatch.patches.fp8.refit.layer_state import Snapshot

Place = tuple[int, str]
"""Identity of a container, and a key or attribute of it."""

ABSENT = object()
"""What a place holds that does not exist."""


class Attributes:
    """What the objects of a model hold at one moment, one level each: attributes, dictionaries, registered tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tables: dict[int, tuple[Any, dict]] = {}
        self._registered: set[int] = set()
        for container in layer_state.held_containers(model.modules()):
            if isinstance(container, torch.nn.Module):
                for table in (container._parameters, container._buffers):
                    self._registered.add(id(table))
                    self._add(table)
            if isinstance(getattr(container, "__dict__", container), dict):
                self._add(container)

    def _add(self, container: Any) -> None:
        self._tables[id(container)] = container, table(container).copy()

    def changes(self) -> dict[Place, tuple[Any, Any]]:
        """Where another object is held now: the container, and what it held.

        Of registered tensors only new ones count: those that were there are the layers' own.
        """
        found = {}
        for identity, (container, old) in self._tables.items():
            new = table(container)
            for key in (old.keys() | new.keys()) - layer_state.TABLES:
                before = old.get(key, ABSENT)
                ours = identity not in self._registered or before is None or before is ABSENT
                if ours and before is not new.get(key, ABSENT):
                    found[identity, key] = container, before
        return found


def table(container: Any) -> dict:
    """Return a dictionary itself, of another object its attributes."""
    return container if isinstance(container, dict) else vars(container)


def get(container: Any, key: str) -> Any:
    """Return what a place holds, or `ABSENT`."""
    return table(container).get(key, ABSENT)


def put(container: Any, key: str, value: Any) -> None:
    """Make a place hold ``value``; `ABSENT` removes it."""
    if value is ABSENT:
        table(container).pop(key, None)
    else:
        table(container)[key] = value


def tensors_below(value: Any, depth: int = 4, apart: Collection[int] = frozenset()) -> Iterator[torch.Tensor]:
    """Yield the tensors that a value is or holds, except through objects whose identity is in ``apart``."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and id(value) not in apart and layer_state.holds_state(value):
        for child in layer_state.children(value):
            yield from tensors_below(child, depth - 1, apart)


class Derived:
    """Keys that post-processing has set, by the container or tensor in use that holds them."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, str], tuple[Callable[[], Any], frozenset[str]]] = {}

    def keys(self, container: Any, table: str = "") -> frozenset[str]:
        """Return the keys among a container's attributes, or in its ``table``."""
        held, keys = self._keys.get((id(container), table), (None, frozenset()))
        return keys if held is not None and held() is container else frozenset()

    def note(self, container: Any, keys: Collection[str], table: str = "") -> None:
        """Note that post-processing has set ``keys``."""
        if keys:
            self._keys[id(container), table] = _reference(container), frozenset(keys)

    def take(self, other: Derived) -> Callable[[], None]:
        """Become equal to ``other``; return how that is undone."""
        before, self._keys = self._keys, other._keys
        return functools.partial(setattr, self, "_keys", before)

    def learn(self, now: Snapshot, before: Snapshot, attributes: Mapping[tuple[int, str], dict]) -> None:
        """Note what the first post-processing has set.

        Args:
            now: the layer's state.
            before: the same before it, without tensors.
            attributes: what the constructor's parameters and buffers carried, by module and key.
        """
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


def tables(container: Any, contents: Any, old: Any) -> Iterator[tuple[str, dict, dict]]:
    """Yield each table of a container, now and before: a module's registered ones have names."""
    if not isinstance(contents, dict):
        return
    if isinstance(container, torch.nn.Module):
        for table in ("_parameters", "_buffers", "_modules"):
            yield table, contents[table], old.get(table, {})
        contents, old = (
            {key: value for key, value in one.items() if key not in layer_state.TABLES}
            for one in (contents, old)
        )
    yield "", contents, old


def _reference(container: Any) -> Callable[[], Any]:
    """Refer to a container, without keeping it alive if that can be."""
    try:
        return weakref.ref(container)
    except TypeError:  # a dictionary
        return lambda: container
