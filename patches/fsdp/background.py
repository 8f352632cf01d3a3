"""Run large pieces of work on a second thread and small ones at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_SMALL = 1 << 20  # bytes


class Background:
    """Run work on a second thread that starts when it is first needed.

    Attributes:
        seconds: spent on all work so far, on either thread.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self.seconds = 0.0

    def submit(self, size: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``function(*args)``, which reads ``size`` bytes."""
        if size >= _SMALL:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="flashpatch-audit")
            return self._pool.submit(self._timed, function, *args)
        done: Future[Any] = Future()
        done.set_result(self._timed(function, *args))
        return done

    def close(self) -> None:
        """Wait for the work that has begun and drop the rest."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _timed(self, function: Callable[..., Any], *args: Any) -> Any:
        began = time.monotonic()
        try:
            return function(*args)
        finally:
            self.seconds += time.monotonic() - began
