"""Keep what several calls and threads begin on an accelerator in one order; on a CPU all is in order already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def current(device: torch.device) -> Any:
    """Return the stream on which this thread works on ``device``."""
    return torch.get_device_module(device).current_stream(device)


@contextmanager
def on(stream: Any, device: torch.device) -> Iterator[None]:
    """Work on ``stream``, behind what this thread has begun on its own; what it begins afterwards comes behind that."""
    own = current(device)
    if own == stream:
        yield
        return
    stream.wait_stream(own)
    try:
        with torch.get_device_module(device).stream(stream):
            yield
    finally:
        own.wait_stream(stream)


def settle() -> None:
    """Wait for copies to the host that are under way: verl's offload begins them and goes on."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
