"""Let a step and an update of one model take turns, in whichever threads they run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


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

    def refusal(self) -> tuple[str, str] | None:
        """Return why no call of an update may begin now, with what to do about it; None if one may."""
        if self.updating:
            return "another update is loading into this model", "Send one update at a time."
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured, which would keep the update", "Send it after the capture."
        return None

    @contextmanager
    def update(self) -> Iterator[None]:
        """Within, no step goes on in another thread, and `updating` is true."""
        with self._lock:
            self.updating = True
            try:
                yield
            finally:
                self.updating = False
