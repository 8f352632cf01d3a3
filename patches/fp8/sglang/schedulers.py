"""Track the schedulers of this process. On SGLang scheduler and model share one."""

from __future__ import annotations

import weakref
from typing import Any

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

_known: weakref.WeakSet[Any] = weakref.WeakSet()


def track(scheduler: Any) -> None:
    """Remember a scheduler of this process."""
    _known.add(scheduler)


def known() -> list[Any]:
    """Return the schedulers that are alive."""
    return list(_known)


def busy() -> bool:
    """Whether requests are running; those that wait, while the engine is paused, hold nothing computed."""
    return any(not idle(scheduler) for scheduler in known())


def idle(scheduler: Any) -> bool:
    """Whether nothing of the cache is in use."""
    return scheduler.is_fully_idle(ignore_waiting=True)


def flush(scheduler: Any) -> bool:
    """Flush the cache although requests wait; False, and nothing, while some run.

    SGLang refuses that because waiting requests may hold parts of it; `idle` has checked that none does.
    """
    if not idle(scheduler):
        return False
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    try:
        return bool(scheduler.flush_cache())
    finally:
        scheduler.waiting_queue = waiting
