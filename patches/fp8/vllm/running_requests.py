"""Track whether requests are running.

The scheduler may live in another process than the workers. An engine core in this process is asked directly;
otherwise the engine core reports to its workers before each call that may carry an update.
"""

from __future__ import annotations

import weakref
from typing import Any

_cores: weakref.WeakSet[Any] = weakref.WeakSet()
_reported = False


def track(core: Any) -> None:
    """Remember an engine core of this process."""
    _cores.add(core)


def running() -> bool:
    """Whether requests are running, as known in this process."""
    return _reported or any(core.scheduler.has_unfinished_requests() for core in list(_cores))


def report(worker: Any, value: bool) -> None:
    """Store what the engine core reports; run on each worker by the engine core."""
    global _reported
    _reported = value
