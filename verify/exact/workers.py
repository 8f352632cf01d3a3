"""Run in each worker process of an engine: record what its modules are given and return."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from flashpatch.verify.exact.calls import Call, recorded
from flashpatch.verify.exact.shards import Pair, layouts_of
from flashpatch.verify.exact.turns import Turns, of_engine

_open = ExitStack()
_calls: list[Call] = []


def start(worker: Any) -> None:
    """Record from here on the calls of the modules of this worker's model."""
    global _calls
    _calls = _open.enter_context(recorded(worker.get_model()))


def stop(worker: Any) -> list[Call]:
    """Return what was recorded since `start`."""
    _open.close()
    return _calls


def layouts(worker: Any) -> dict[str, Pair]:
    """Return how the tensors of this worker's modules lie on the ranks."""
    return layouts_of(worker.get_model())


def turns(worker: Any) -> Turns:
    """Return what this worker turns queries and keys by."""
    return of_engine(worker.get_model())
