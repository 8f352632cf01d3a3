"""Let a step and an update of one model take turns, in whichever threads they run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class Turns:
    """The turns of one model.

    Attributes:
        updating: a call of an update is under way.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.updating = False

    def step(self) -> AbstractContextManager:
        """Within, no update goes on in another thread: a step computes, or decides what to compute."""
        return self._lock

    @contextmanager
    def update(self) -> Iterator[None]:
        """Within, no step goes on in another thread, and `updating` is true."""
        with self._lock:
            self.updating = True
            try:
                yield
            finally:
                self.updating = False
