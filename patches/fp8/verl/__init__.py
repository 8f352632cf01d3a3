"""Updates under verl: a transfer that cannot hang in silence, one policy on all replicas, watched for drift."""

from __future__ import annotations

from flashpatch.patches.fp8.verl import expected_processes
from flashpatch.patches.fp8.verl.correction.rollout_correction import (
    mismatch,
    rollout_correction,
    sample_precision,
)
from flashpatch.patches.fp8.verl.transfer import (
    checkpoint_manager,
    export_time,
    http_server,
    receiver,
    rollout_worker,
    sender,
    server_adapter,
)

PATCHES = (
    sender.SEND,
    sender.SOCKET,
    sender.CLEANUP,
    receiver.RECEIVE,
    receiver.SOCKET,
    receiver.CLEANUP,
    rollout_worker.PATCH,
    http_server.PATCH,
    http_server.CLEAR,
    server_adapter.UPDATE,
    server_adapter.EXECUTE,
    export_time.PATCH,
    checkpoint_manager.UPDATE,
    checkpoint_manager.LOG,
    expected_processes.WORKERS,
    expected_processes.SERVERS,
    rollout_correction.PATCH,
    rollout_correction.LOGPROBS,
    mismatch.MEASURE,
    mismatch.PRECISIONS,
    sample_precision.PATCH,
)
