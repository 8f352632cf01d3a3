"""Write to a file system that may not answer, in a thread that lives while there is something to write. Who hands something
over waits for it, but never for long: no step may hang on a ledger."""

from __future__ import annotations

import _thread
import os
import queue
import time
from collections.abc import Callable

MOST = 10_000  # jobs that may wait
PATIENCE = 2.0  # seconds for which a caller waits, once until the file system answers again
_LINGER = 0.002  # seconds for which the thread waits for more


class Writer:
    """Do jobs one after the other, which raise nothing. Safe in signal handlers and finalizers: it takes no lock that it
    waits for."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin with nothing, as in a forked child, which has no thread of its parent's."""
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], _thread.LockType | None]] = (
            queue.SimpleQueue()
        )
        self._runs = _thread.allocate_lock()  # held while a thread does jobs
        self._thread = 0  # the one that does
        self._starts = 0  # the thread of Python that may be starting it
        self._later: tuple[float, Callable[[], object]] | None = None
        self.hangs = 0.0  # since when

    def do(self, job: Callable[[], object], wait: bool = True) -> bool:
        """Hand over a job, and ``wait`` for it; return whether it is taken: if too many wait, it never will be done."""
        if self._jobs.qsize() >= MOST:
            return False
        done = _thread.allocate_lock()
        done.acquire()
        self._jobs.put((job, done))
        waits = self._start(self._run_here) and wait
        if waits and not self.hangs and not done.acquire(timeout=PATIENCE):
            self.hangs = time.monotonic()
        return True

    def later(self, when: float, job: Callable[[], object]) -> bool:
        """Have a job done at a time of the monotonic clock, or before that in the place of the one that waits for its
        time; return whether it will be: not while the interpreter shuts down."""
        if self._later is None or when < self._later[0]:
            self._later = when, job
        self._jobs.put((_nothing, None))  # a thread that waits for another time looks again
        self._start(self._give_up)
        return self._later is not None

    def _start(self, otherwise: Callable[[], object]) -> bool:
        """Start the thread unless it runs, or call ``otherwise`` if none can be started; return whether a caller may wait
        for it: not that thread itself, nor one that, in a signal handler, has interrupted the call that starts it."""
        me = _thread.get_ident()
        waits = me not in (self._starts, self._thread)
        self._starts = me
        if self._runs.acquire(blocking=False):
            waits = True
            try:
                _thread.start_new_thread(self._run, ())  # Thread.start() takes a lock of the whole process
            except RuntimeError:  # the interpreter is shutting down: no new threads
                otherwise()
        self._starts = 0
        return waits

    def _give_up(self) -> None:
        self._later = None
        self._runs.release()

    def _run_here(self) -> None:
        self._later = None  # whose job flushes at exit
        self._run()

    def _run(self) -> None:
        self._thread = _thread.get_ident()
        while True:
            later, now = self._later, time.monotonic()
            if later is not None and later[0] <= now:
                self._later = None
                later[1]()
                continue
            try:
                job, done = self._jobs.get(timeout=_LINGER if later is None else later[0] - now)
            except queue.Empty:
                if self._later is not None:
                    continue
                self._thread = 0
                self._runs.release()
                if self._jobs.empty() or not self._runs.acquire(blocking=False):
                    return
                self._thread = _thread.get_ident()
                continue
            job()
            self.hangs = 0.0
            if done is not None:
                done.release()


def _nothing() -> None:
    """Be a job that only wakes the thread."""


writer = Writer()
os.register_at_fork(after_in_child=writer.begin)
