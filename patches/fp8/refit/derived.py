"""Know what the last post-processing of a layer has set: a fresh load has of it what the next one sets again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from flashpatch.patches.fp8.refit import layer_state
from flashpatch.patches.fp8.refit.attributes import ABSENT
from flashpatch.patches.fp8.refit.layer_state import Snapshot


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
            for table, held, known in _tables(container, contents, old):
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


def _tables(container: Any, contents: Any, old: Any) -> Iterator[tuple[str, dict, dict]]:
    """Yield each table of a container, now and before: a module's registered ones have names."""
    if not isinstance(contents, dict):
        return
    if isinstance(container, torch.nn.Module):
        for table in ("_parameters", "_buffers", "_modules"):
            yield table, contents[table], old.get(table, {})
        contents = {key: value for key, value in contents.items() if key not in layer_state.TABLES}
    yield "", contents, old


def _reference(container: Any) -> Callable[[], Any]:
    """Refer to a container, without keeping it alive if that can be."""
    try:
        return weakref.ref(container)
    except TypeError:  # a dictionary
        return lambda: container
