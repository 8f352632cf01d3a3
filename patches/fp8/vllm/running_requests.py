"""Whether requests are running, as known in this process.

The scheduler may live in another process than the workers. An engine core in this process is asked directly;
otherwise the engine core tells its workers before each call that may carry an update.
"""

from __future__ import annotations

import weakref
from typing import Any

_cores: weakref.WeakSet[Any] = weakref.WeakSet()
_told = False


def watch(core: Any) -> None:
    """An engine core lives in this process."""
    _cores.add(core)


def running() -> bool:
    return _told or any(core.scheduler.has_unfinished_requests() for core in list(_cores))


def tell(worker: Any, value: bool) -> None:
    """Run on each worker by the engine core."""
    global _told
    _told = value
