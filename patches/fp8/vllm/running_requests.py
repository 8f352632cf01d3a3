"""Track whether requests have begun: those that have not meet the next policy alone.

What a scheduler calls unfinished leaves out those that it holds back while the engine is paused. The scheduler may live in another process than the workers. An engine core in this process is asked directly;
otherwise the engine core reports to its workers before each call that may carry an update.
"""

from __future__ import annotations

import weakref
from typing import Any

_cores: weakref.WeakSet[Any] = weakref.WeakSet()
_reported: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # by model runner


def track(core: Any) -> None:
    """Remember an engine core of this process."""
    _cores.add(core)


def running(runner: Any) -> bool:
    """Whether requests have begun on a model runner, as known in this process; None: on any."""
    reported = any(_reported.values()) if runner is None else _reported.get(runner, False)
    return reported or any(
        begun(core) for core in list(_cores) if runner is None or _driven_by(core) is runner
    )


def begun(core: Any) -> list[str]:
    """Return the requests that hold tokens or KV of the policy so far; one that was preempted waits with its tokens."""
    requests = (one for one in list(core.scheduler.requests.values()) if not one.is_finished())
    return [one.request_id for one in requests if one.num_computed_tokens or one.num_output_tokens]


def report(worker: Any, value: bool) -> None:
    """Store what the engine core reports; run on each worker by the engine core."""
    _reported[worker.model_runner] = value


def _driven_by(core: Any) -> Any:
    """Return the model runner that an engine core drives in its own process, or None."""
    worker = getattr(core.model_executor, "driver_worker", None)
    return None if worker is None else worker.model_runner
