"""Run the labs for tests, two processes side by side, begun in the order in which the tests come."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm

from cuda_lab import runs

NEEDS_DEVICE = pytest.mark.skipif(not runs.is_built(), reason="the fake CUDA device is not built here")


@dataclass(frozen=True)
class Run:
    """One process: what of `runs.run`'s arguments makes it this one."""

    what: str
    mode: str
    capability: int
    names: tuple[str, ...]
    more: tuple[tuple[str, str], ...] = ()
    is_new: bool = False  # a new interpreter, not a fork of one that has imported vLLM


def parameters(cases: Callable[[int], Iterable[str]], *runs: Mapping[int, Run]) -> list[Any]:
    """Return parameters for each case of each capability: both, and marks that name the runs which it needs."""
    return [
        pytest.param(at, name, id=f"{name}-{at}", marks=pytest.mark.runs(*(one[at] for one in runs)))
        for at in runs[0]
        for name in cases(at)
    ]


class Lane:
    """The runs of a session of tests; each is made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(2)
        self._futures: dict[Run, Future] = {}

    def begin(self, wanted: Iterable[Run]) -> None:
        """Start those that were not started yet, as soon as one of the two processes is free."""
        for run in wanted:
            if run not in self._futures:
                self._futures[run] = self._pool.submit(self._made, run)

    def result(self, run: Run) -> dict[str, dict[str, Any]]:
        """Return what a run found by case; waits for it."""
        self.begin([run])
        return self._futures[run].result()

    def close(self) -> None:
        """Wait for the runs under way; those that were not begun are dropped."""
        self._pool.shutdown(cancel_futures=True)

    def _made(self, run: Run) -> dict[str, dict[str, Any]]:
        imported, what = () if run.is_new else warm.VLLM_CUDA, (run.what, run.mode, run.capability)
        return runs.run(self._folder, *what, run.names, imported, **dict(run.more))
