"""Updates under verl: a transfer that cannot hang in silence, one policy on all replicas, watched for drift."""

from __future__ import annotations

from flashpatch.patches.fp8.verl import (
    adapter,
    correction,
    export,
    manager,
    mismatch,
    receiver,
    samples,
    sender,
    server,
    spawn,
    worker,
)

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
    correction.PATCH,
    correction.LOGPROBS,
    mismatch.MEASURE,
    mismatch.PRECISIONS,
    samples.PATCH,
)
