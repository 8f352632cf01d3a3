"""Write to a file system that may not answer, in a thread that lives while there is something to write. Who hands something
over waits for it, but never for long: no step may hang on a ledger.
"""

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
    """Do jobs one after the other. Safe in signal handlers and finalizers: it takes no lock that it waits for."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin with nothing, as in a forked child, which has no thread of its parent's."""
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], _thread.LockType]] = queue.SimpleQueue()
        self._runs = _thread.allocate_lock()  # held while a thread does jobs
        self._starts = 0  # the thread of Python that may be starting the one that works
        self.hangs = 0.0  # since when

    def do(self, job: Callable[[], object]) -> bool:
        """Hand over a job that raises nothing; return whether it is taken: if too many wait, it never will be done."""
        if self._jobs.qsize() >= MOST:
            return False
        done = _thread.allocate_lock()
        done.acquire()
        self._jobs.put((job, done))
        me = _thread.get_ident()
        waits = self._starts != me  # else a signal has interrupted the call that starts it
        self._starts = me
        if self._runs.acquire(blocking=False):
            waits = True
            try:
                _thread.start_new_thread(
                    self._run, ()
                )  # a Thread's start() takes a lock of the whole process
            except RuntimeError:  # the interpreter is shutting down: no new threads
                self._run()
        self._starts = 0
        if waits and not self.hangs and not done.acquire(timeout=PATIENCE):
            self.hangs = time.monotonic()
        return True

    def _run(self) -> None:
        while True:
            try:
                job, done = self._jobs.get(timeout=_LINGER)
            except queue.Empty:
                self._runs.release()
                if self._jobs.empty() or not self._runs.acquire(blocking=False):
                    return
                continue
            job()
            self.hangs = 0.0
            done.release()


writer = Writer()
os.register_at_fork(after_in_child=writer.begin)
