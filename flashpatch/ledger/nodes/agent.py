"""Publish this node's run directory while this process is connected to Ray, if no other process of the node does.

A daemon thread begins when Ray is imported and asks once in half a second whether this process is connected. Of the
processes that are, one publishes: the one that holds the lock on a file in the run directory, which ends with the
process, so another takes over. Files of processes that are not connected are published by it too. The job's driver also
copies what the other nodes published into its own run directory, so that it stays there when the cluster is gone. A
failure never reaches the job: it is logged once, and tried again later.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import sys
import threading
import time

from flashpatch.ledger import files
from flashpatch.ledger.nodes import keys, ray_store
from flashpatch.ledger.nodes.publisher import Publisher

LOCK = ".publisher-"
"""How the name of the file begins that the publishing process of a directory and node holds a lock on."""

_ASK = 0.5  # seconds between two looks whether this process is connected
_PERIOD = 2.0  # seconds between two looks at the directory
_COPY = 10.0  # seconds between two copies of what other nodes published
_SHARE = 0.05  # of the time that publishing may take
_LONGEST = 60.0  # seconds between two attempts while Ray does not answer
_AT_EXIT = 1.0  # seconds that a call may take when the process ends

_log = logging.getLogger("flashpatch")
_agent: Agent | None = None


class Agent:
    """The thread of one process and what it holds."""

    def __init__(self) -> None:
        self._connection: ray_store.Connection | None = None
        self._store: ray_store.Store | None = None
        self._publisher: Publisher | None = None
        self._lock: int | None = None
        self._copied = float("-inf")
        self._warned = False
        self._exit_is_watched = False
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="flashpatch-nodes", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down: no new threads
            pass

    def _run(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            try:
                with self._busy:
                    connected = self._turn()
                failures = 0
            except Exception as error:  # whatever it is, it must not end here: nothing would report it
                connected, failures = True, failures + 1
                self._publisher = self._store = None
                self._warn(error)
            took = time.monotonic() - began
            wait = min(_LONGEST, _PERIOD * 2 ** min(failures, 5)) if connected else _ASK
            time.sleep(max(wait, took / _SHARE))

    def _turn(self) -> bool:
        """Publish changes if elected; return whether Ray is connected."""
        connection = ray_store.connection()
        if connection != self._connection:
            self._publisher, self._store, self._connection = None, None, connection
            self._unlock()
        if connection is None:
            return False
        self._watch_exit()
        folder = os.path.dirname(files.row_path())
        is_elected = self._elected(folder, connection.node)
        if not is_elected and not connection.is_driver:
            return True
        if self._store is None:
            self._store = ray_store.Store(connection.address)
        if is_elected:
            if self._publisher is None:
                self._publisher = Publisher(self._store, files.run_id(), folder, connection.node)
                _prune(self._store)
            self._publisher.publish()
        if connection.is_driver and time.monotonic() - self._copied >= _COPY:
            self._copy(folder)
        return True

    def _copy(self, folder: str) -> None:
        """Copy what other nodes published. Raises StoreError and OSError."""
        from pathlib import Path

        from flashpatch.ledger.nodes import fetch

        assert self._store is not None and self._connection is not None
        here = keys.place(self._connection.node, files.host(), folder)
        fetch.fetch(self._store, files.run_id(), Path(folder), here)
        self._copied = time.monotonic()

    def _elected(self, folder: str, node: str) -> bool:
        """Whether this process holds the lock of its directory and node, or has just got it."""
        if self._lock is not None:
            return True
        name = f"{LOCK}{keys.place(node, files.host(), folder)}"
        try:
            lock = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # no row was written yet, or none can be, which its writer says
            return False
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # another process holds it
            os.close(lock)
            return False
        self._lock = lock
        return True

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _watch_exit(self) -> None:
        """Publish and copy once more at exit: registered after Ray was imported, so it is called before Ray disconnects."""
        if not self._exit_is_watched:
            self._exit_is_watched = True
            atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if self is not _agent or not self._busy.acquire(timeout=_AT_EXIT):
            return
        row = sys.modules.get("flashpatch.ledger.row")
        try:
            connection = ray_store.connection()
            if self._store is None or connection is None:
                return
            self._store.timeout = _AT_EXIT
            if row is not None:
                row.flush()
            if self._publisher is not None:
                self._publisher.publish(whole=True)
            if connection.is_driver:
                self._copy(os.path.dirname(files.row_path()))
        except Exception as error:
            self._warn(error)
        finally:
            self._busy.release()

    def _warn(self, error: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        folder = os.path.dirname(files.row_path())
        _log.warning(
            "flashpatch: the ledger of this node is not gathered through Ray for now: %s. It is kept in %s on this "
            "node; FLASHPATCH_LEDGER_RAY=0 leaves it there",
            str(error).rstrip("."),
            folder,
        )


def start() -> None:
    """Start this process's thread; later calls do nothing."""
    global _agent
    if _agent is None:
        _agent = Agent()
        _agent.start()


def _prune(store: ray_store.Store) -> None:
    from flashpatch.ledger import old_runs
    from flashpatch.ledger.nodes import old_keys

    try:
        days, runs = old_runs.limits()
        old_keys.prune(store, files.run_id(), days, runs)
    except ValueError as error:  # a limit is no number
        _log.warning("flashpatch: old runs are not removed from Ray: %s", error)


def _after_fork() -> None:
    """In a forked child: it is not connected, whatever Ray's copied state says, so only one of a parent that was not
    may connect later. The lock stays the parent's: it is its process's alone."""
    global _agent
    agent, _agent = _agent, None
    if agent is None:
        return
    if agent._lock is not None:
        os.close(agent._lock)
    if not agent._exit_is_watched:
        start()


os.register_at_fork(after_in_child=_after_fork)
