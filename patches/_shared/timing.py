"""Add up the seconds that something takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def timed(held: Any, name: str) -> Iterator[None]:
    """Add the seconds of the block to the attribute ``name`` of ``held``."""
    began = time.perf_counter()
    try:
        yield
    finally:
        setattr(held, name, getattr(held, name) + time.perf_counter() - began)
