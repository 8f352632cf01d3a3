"""Publish this node's run directory while this process is connected to Ray, if no other process of the node does.

A daemon thread begins when Ray is imported and asks every second whether this process is connected. Of the
processes that are, one publishes: the one that holds the lock on a file in the run directory, which ends with the
process, so another takes over. Files of processes that are not connected are published by it too. The job's driver also
copies what the other nodes published into its own run directory, so that it stays there when the cluster is gone. A
failure never reaches the job: it is logged once, and tried again later."""

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

LOCK = ".publisher-"
"""How the name of the file begins that the publishing process of a directory and node holds a lock on."""

_ASK = 1.0  # seconds between two looks whether this process is connected, and whether nobody holds the lock
_PERIOD = 10.0  # seconds between two times that everything is published, and copied
_SHARE = 0.05  # of the time that publishing may take
_AT_EXIT = 1.0  # seconds that a call may take when the process ends

_log = logging.getLogger("flashpatch")
_agent: Agent | None = None


class Agent:
    """The thread of one process and what it holds."""

    def __init__(self) -> None:
        self._connection: ray_store.Connection | None = None
        self._store: ray_store.Store | None = None
        self._lock: int | None = None
        self._due = 0.0  # when everything is to be published and copied next
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
        while True:
            began = time.monotonic()
            try:
                with self._busy:
                    self._turn()
            except Exception as error:  # whatever it is, it must not end here: nothing would report it
                self._store, self._due = None, time.monotonic() + _PERIOD
                self._warn(error)
            time.sleep(max(_ASK, (time.monotonic() - began) / _SHARE))

    def _turn(self) -> None:
        connection = ray_store.connection()
        if connection != self._connection:
            self._store, self._connection, self._due = None, connection, 0.0
            self._unlock()
        if connection is None:
            return
        if not self._exit_is_watched:  # after Ray was imported, so it is called before Ray disconnects
            self._exit_is_watched = True
            atexit.register(self._at_exit)
        folder = os.path.dirname(files.row_path())
        acts = self._elected(folder, connection.node) or connection.is_driver
        if acts and time.monotonic() >= self._due:
            is_first = self._store is None
            self._store = self._store or ray_store.Store(connection.address)
            self._publish(folder, connection, is_first)
            self._due = time.monotonic() + _PERIOD

    def _publish(self, folder: str, connection: ray_store.Connection, prunes: bool = False) -> None:
        """Publish, and prune old runs, if this process is elected; copy what others published if it is the driver."""
        from pathlib import Path

        from flashpatch.ledger.nodes import node, published

        assert self._store is not None
        if self._lock is not None:
            published.publish(self._store, files.run_id(), folder, connection.node)
            if prunes:
                published.prune(self._store, files.run_id())
        if connection.is_driver:
            here = keys.place(connection.node, files.host(), folder)
            node.fetch(self._store, files.run_id(), Path(folder), here)

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
        self._lock, self._due = lock, 0.0
        return True

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _at_exit(self) -> None:
        if self is not _agent or not self._busy.acquire(timeout=_AT_EXIT):
            return
        try:
            connection = ray_store.connection()
            if self._store is None or connection is None:
                return
            self._store.timeout = _AT_EXIT
            if row := sys.modules.get("flashpatch.ledger.row"):
                row.flush()
            self._publish(os.path.dirname(files.row_path()), connection)
        except Exception as error:
            self._warn(error)
        finally:
            self._busy.release()

    def _warn(self, error: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        _log.warning(
            "flashpatch: the ledger of this node is not gathered through Ray for now: %s. It is kept in %s on this "
            "node; FLASHPATCH_LEDGER_RAY=0 leaves it there",
            str(error).rstrip("."),
            os.path.dirname(files.row_path()),
        )


def start() -> None:
    """Start this process's thread; later calls do nothing."""
    global _agent
    if _agent is None:
        _agent = Agent()
        _agent.start()


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
