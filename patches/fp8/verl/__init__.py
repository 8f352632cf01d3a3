"""Update weights under verl, whichever engine rolls out: compare replicas, measure the mismatch."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.fp8.verl import (
    adapters,
    delta_sync,
    delta_versions,
    expected_processes,
    float32_head,
    verl_config,
)
from flashpatch.patches.fp8.verl.correction import mismatch
from flashpatch.patches.fp8.verl.transfer import checkpoint_manager

PATCHES = collected(
    delta_sync,
    adapters,
    delta_versions,
    checkpoint_manager,
    expected_processes,
    verl_config,
    mismatch,
    float32_head,
)
