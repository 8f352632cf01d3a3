"""Call a method on all ranks and raise only after every rank has answered.

vLLM's multiprocess executor reads the workers' answers one by one and stops at the first failure; the answers
of the ranks behind it stay in their queues and are taken for the answers to the *next* call. So a failure is
sent back as an ordinary answer here, and raised once all ranks have answered."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("flashpatch")

on_failure: list[Callable[[int, str], None]] = []
"""Called on a worker with the number of a call that failed there, and the error."""

_numbers = itertools.count(1)
_current: int | None = None


@dataclass
class Failure:
    """Hold a worker's exception as text: not every exception survives pickling."""

    summary: str
    trace: str


def wrap(method: str | Callable, args: tuple, kwargs: dict | None) -> tuple[Callable, tuple]:
    """Return ``(method, args)`` of a call that never raises on the worker."""
    if callable(method):
        import cloudpickle

        method = cloudpickle.dumps(method)
    return guarded, (next(_numbers), method, args, kwargs or {})


def current_call() -> int | None:
    """Return the number of the call that this worker is executing, the same on all ranks; None outside of one."""
    return _current


def guarded(worker: Any, number: int, method: str | bytes, args: tuple, kwargs: dict) -> Any:
    """Run a method on this worker; return its result, or a `Failure`."""
    from vllm.v1.serial_utils import run_method

    global _current
    _current = number
    try:
        return run_method(worker, method, args, kwargs)
    except Exception as error:
        logger.exception("a call to this worker failed")
        failure = Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
        for report in on_failure:
            report(number, failure.summary)
        return failure
    finally:
        _current = None


def unwrap(results: list[Any]) -> list[Any]:
    """Return the results, if no rank failed. Raises RuntimeError, which names every rank that failed, with the first
    one's traceback."""
    failed = {rank: result for rank, result in enumerate(results) if isinstance(result, Failure)}
    if failed:
        lines = "; ".join(f"rank {rank}: {failure.summary}" for rank, failure in failed.items())
        raise RuntimeError(f"Worker failed with error '{lines}'\n{next(iter(failed.values())).trace}")
    return results
