"""Serve targets that both coroutines and plain functions call."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any


def caller_awaits() -> bool:
    """Whether a coroutine called the patched function, ignoring FlashPatch's own frames.

    verl's ``auto_await`` (verl/utils/ray_utils.py) decides in the same way, by its caller's frame.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("flashpatch."):
        frame = frame.f_back
    return frame is not None and bool(frame.f_code.co_flags & inspect.CO_COROUTINE)


async def resolve(result: Any) -> Any:
    """Await a result if it can be awaited; else return it as it is."""
    return await result if inspect.isawaitable(result) else result


def followed(call: Callable[[], Any], after: Callable[[], None]) -> Any:
    """Make a call, and ``after`` it another: in a thread if the caller awaits the result, or else here."""
    if not caller_awaits():
        result = call()
        after()
        return result

    async def awaited() -> Any:
        result = await resolve(call())
        await asyncio.to_thread(after)
        return result

    return awaited()
