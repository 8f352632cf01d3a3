"""Recognise the parameters of FlowRL's partition function by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

HEAD = "proj_z"
"""The attribute of the actor's module, as in FlowRL's published code."""

MODE = "flowrl"
"""verl's ``actor.policy_loss.loss_mode``."""

FOLDER, FILE = "flowrl", "proj_z.safetensors"
"""Folder of the partition function in an exported model, where loaders of the model do not look."""


def is_head(name: str) -> bool:
    """Whether a parameter's name belongs to the partition function, whatever wraps it or the model."""
    return HEAD in name.split(".")


def without_head(pairs: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yield tuples ``(parameter name, ...)`` except those of the partition function."""
    return (pair for pair in pairs if not is_head(pair[0]))
