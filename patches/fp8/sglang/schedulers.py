"""Track the schedulers of this process. On SGLang scheduler and model share one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

_known: weakref.WeakKeyDictionary[Any, Callable[[Any], bool]] = weakref.WeakKeyDictionary()


def idle_but_waiting(scheduler: Any) -> bool:
    """Whether nothing of a scheduler's cache is in use: requests that wait hold nothing computed."""
    return scheduler.is_fully_idle(ignore_waiting=True)


def track(scheduler: Any, idle: Callable[[Any], bool] = idle_but_waiting) -> None:
    """Remember a scheduler of this process, and how this generation of SGLang tells whether its cache is in use."""
    _known[scheduler] = idle


def known() -> list[Any]:
    """Return the schedulers that are alive."""
    return list(_known)


def busy() -> bool:
    """Whether requests are running; those that wait, while the engine is paused, hold nothing computed."""
    return any(not idle(scheduler) for scheduler in known())


def idle(scheduler: Any) -> bool:
    """Whether nothing of the cache is in use."""
    return _known.get(scheduler, idle_but_waiting)(scheduler)


def flush(scheduler: Any) -> bool:
    """Flush the cache although requests wait; False, and nothing, while some run.

    SGLang refuses that because waiting requests may hold parts of it; `idle` has checked that none does.
    """
    if not idle(scheduler):
        return False
    with nothing_waiting(scheduler):
        return bool(scheduler.flush_cache())


@contextmanager
def nothing_waiting(scheduler: Any) -> Iterator[None]:
    """Within, the scheduler's queue is empty; afterwards it is as before."""
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    try:
        yield
    finally:
        scheduler.waiting_queue = waiting
