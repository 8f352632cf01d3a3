"""Updates under verl: a transfer that cannot hang in silence, and one policy on all replicas."""

from __future__ import annotations

from flashpatch.patches.fp8.verl import adapter, export, manager, receiver, sender, server, spawn, worker

PATCHES = (
    sender.SEND,
    sender.SOCKET,
    sender.CLEANUP,
    receiver.RECEIVE,
    receiver.SOCKET,
    receiver.CLEANUP,
    worker.PATCH,
    server.PATCH,
    server.CLEAR,
    adapter.UPDATE,
    adapter.EXECUTE,
    export.PATCH,
    manager.UPDATE,
    manager.LOG,
    spawn.WORKERS,
    spawn.SERVERS,
)
