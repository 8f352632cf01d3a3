"""Name the two messages that travel with the weights: one before the first, one after the last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flashpatch.patches._shared import tensor_message

if TYPE_CHECKING:
    import torch

OPEN = "__flashpatch_audit_open__"
CLOSE = "__flashpatch_audit_close__"


def opening(content: dict[str, Any], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Encode the message before the weights."""
    yield from tensor_message.encode(OPEN, content, device)


def closing(content: dict[str, Any], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Encode the message after the weights."""
    yield from tensor_message.encode(CLOSE, content, device)


def ours(name: str) -> bool:
    return name.startswith((OPEN, CLOSE))
