"""The partition function's name in a model, and the names of what belongs to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

HEAD = "proj_z"
"""The attribute of the actor's module, as in FlowRL's published code."""

MODE = "flowrl"
"""verl's ``actor.policy_loss.loss_mode``."""

FOLDER, FILE = "flowrl", "proj_z.safetensors"
"""Where an exported model keeps its partition function, out of reach of whoever loads the model."""


def is_head(name: str) -> bool:
    """Whether a parameter's name belongs to the partition function, whatever wraps it or the model."""
    return HEAD in name.split(".")


def without_head(pairs: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Tuples whose first element is a parameter's name, without the partition function's."""
    return (pair for pair in pairs if not is_head(pair[0]))
