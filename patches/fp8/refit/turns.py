"""Let a step and an update of one model take turns, in whichever threads they run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Turns:
    """The turns of one model; within ``step`` no update goes on in another thread: a step computes, or decides what to."""

    def __init__(self) -> None:
        self.step = threading.RLock()
        self._updating: int | None = None  # the thread of the call of an update that is under way

    def refusal(self, reads: bool) -> tuple[str, str] | None:
        """Return why no call of an update may begin now, with what to do about it; None if one may, in its turn.

        Args:
            reads: the call that is under way reads what a sender hands over, which another one may never wait for.
        """
        if reads or self._updating == threading.get_ident():
            return "another update is loading into this model", "Send one update at a time."
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured, which would keep the update", "Send it after the capture."
        return None

    @contextmanager
    def update(self) -> Iterator[None]:
        """Within, no step and no other call of an update goes on in another thread."""
        with self.step:
            self._updating = threading.get_ident()
            try:
                yield
            finally:
                self._updating = None
