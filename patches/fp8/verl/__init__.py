"""Update weights under verl, whichever engine rolls out: compare replicas, measure the mismatch."""

from __future__ import annotations

from flashpatch.patches.fp8.verl import (
    adapters,
    certificate,
    delta_sync,
    delta_versions,
    expected_processes,
    float32_head,
    unsupported,
    wrapped_adapters,
)
from flashpatch.patches.fp8.verl.correction import mismatch, rollout_correction
from flashpatch.patches.fp8.verl.support import PATCHES as SUPPORT
from flashpatch.patches.fp8.verl.transfer import checkpoint_manager, export_time

PATCHES = (
    export_time.PATCH,
    delta_sync.SEND,
    delta_sync.CAST,
    delta_sync.RECEIVE,
    adapters.PATCH,
    wrapped_adapters.PATCH,
    delta_versions.PATCH,
    checkpoint_manager.UPDATE,
    checkpoint_manager.LOG,
    *expected_processes.patches,
    unsupported.PATCH,
    certificate.PATCH,
    rollout_correction.PATCH,
    rollout_correction.LOGPROBS,
    mismatch.MEASURE,
    mismatch.PRECISIONS,
    float32_head.PATCH,
    *SUPPORT,
)
