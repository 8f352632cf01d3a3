"""Set a context variable or an attribute, or add up seconds, for the length of a block."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable a value inside the block; after it, it has what it had before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def having(held: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object's attribute a value inside the block; after it, the object has what it had before, or its class's."""
    own = getattr(held, "__dict__", {})
    was_own, before = name in own, own[name] if name in own else getattr(held, name, None)
    setattr(held, name, value)
    try:
        yield
    finally:
        if was_own or name not in own:  # a slot is in no dictionary
            setattr(held, name, before)
        else:
            delattr(held, name)


@contextmanager
def timed(held: Any, name: str) -> Iterator[None]:
    """Add the seconds of the block to the attribute ``name`` of ``held``."""
    began = time.perf_counter()
    try:
        yield
    finally:
        setattr(held, name, getattr(held, name) + time.perf_counter() - began)
