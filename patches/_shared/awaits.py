"""Serve targets that both coroutines and plain functions call.

verl's ``auto_await`` (verl/utils/ray_utils.py) looks at the frame of its caller: only a coroutine gets a coroutine back. Called from
a plain function while a loop runs, it runs the target on another loop and blocks this one. So a coroutine calls the target itself.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any


def caller_awaits() -> bool:
    """Whether a coroutine called the patched function, ignoring FlashPatch's own plain functions in between."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_flags & inspect.CO_COROUTINE:
        if not frame.f_globals.get("__name__", "").startswith("flashpatch."):
            return False
        frame = frame.f_back
    return frame is not None


async def resolve(result: Any) -> Any:
    """Await a result if it can be awaited; else return it as it is."""
    return await result if inspect.isawaitable(result) else result


async def _awaited(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await resolve(original(*args, **kwargs))


def as_called(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a target as this function's caller was called: return what can be awaited if it was by a coroutine."""
    return _awaited(original, *args, **kwargs) if caller_awaits() else original(*args, **kwargs)


def followed(after: Callable[[], None], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a target as `as_called` does, and ``after`` it another: in a thread if the caller awaits the result, or else here."""
    if not caller_awaits():
        result = original(*args, **kwargs)
        after()
        return result

    async def awaited() -> Any:
        result = await _awaited(original, *args, **kwargs)
        await asyncio.to_thread(after)
        return result

    return awaited()
