"""Hold what this process knows of its rollouts until its trainer logs next: mismatch, syncs, policy version, refusals."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from flashpatch import ledger
from flashpatch.ledger import files, runs

_LAST = frozenset({"sync/policy_version"})


class RolloutNumbers:
    """Numbers of the syncs and batches since the trainer last logged. A forked child starts with none."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._lock = threading.Lock()
        self._values: dict[str, list[float]] = {}

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add numbers of one sync or one batch, by the names under which they are logged."""
        with self._lock:
            for name, value in numbers.items():
                self._values.setdefault(name, []).append(float(value))

    def take(self) -> dict[str, float]:
        """Return and forget them: the mean per name, of versions the last."""
        with self._lock:
            values, self._values = self._values, {}
        return {name: _joined(name, found) for name, found in values.items()}


def of_engines() -> dict[str, float]:
    """Return what the engines of this job say of themselves, wherever they run on this host; empty if none is known.

    ``sync/policy_version``, the oldest that a worker holds; ``sync/updates_refused``, updates refused or abandoned
    since the job began; ``sync/requests_refused``, how often requests were refused."""
    notes = [note for note in _notes() if "policy_version" in note]
    if not notes:
        return {}
    return {
        "sync/policy_version": float(min(note["policy_version"] for note in notes)),
        "sync/updates_refused": float(_total(notes, "updates_refused")),
        "sync/requests_refused": float(_total(notes, "requests_refused")),
    }


def _notes() -> Iterable[Mapping[str, Any]]:
    """The notes of this process, and of the others of this job that are alive."""
    yield ledger.notes()
    run = runs.read_run(files.directory() / files.run_id())
    for row in run.rows if run is not None else ():
        if row.alive and row.pid != os.getpid():
            yield row.notes


def _total(notes: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(note.get(name, 0) for note in notes)


def _joined(name: str, values: list[float]) -> float:
    return values[-1] if name in _LAST else sum(values) / len(values)


NUMBERS = RolloutNumbers()
os.register_at_fork(after_in_child=NUMBERS.reset)
