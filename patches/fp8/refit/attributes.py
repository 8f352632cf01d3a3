"""Find out what a call has set on the objects of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from flashpatch.patches.fp8.refit import layer_state

Place = tuple[int, str]
"""Identity of a container, and a key or attribute of it."""

ABSENT = object()
"""What a place holds that does not exist."""


class Attributes:
    """What the objects of a model hold at one moment, one level each: attributes, dictionaries, registered tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tables: dict[int, tuple[Any, dict]] = {}
        self._registered: set[int] = set()
        for container in layer_state.held_containers(model):
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
