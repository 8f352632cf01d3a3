"""Measure the time the trainer's engine spends gathering before the first weight."""

from __future__ import annotations

import time
from typing import Any

from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
from flashpatch.record import Contract, Patch


def on_export(original, self, *args: Any, **kwargs: Any) -> Any:
    """Around ``get_per_tensor_param``: FSDP1 gathers whole weights here, before the generator starts."""
    began = time.perf_counter()
    try:
        return original(self, *args, **kwargs)
    finally:
        WEIGHT_SYNC.export_seconds += time.perf_counter() - began


PATCH = Patch(
    id="fp8.verl.get_per_tensor_param",
    targets=("verl.workers.engine.fsdp.transformer_impl:FSDPEngine.get_per_tensor_param",),
    requires="verl>=0.9",
    wrapper=on_export,
    contract=Contract(params=("layered_summon", "base_sync_done"), mentions=("self.module.state_dict",)),
    evidence="update",
    when="anywhere=fsdp.verl.get_sharding_strategy anywhere=fp8.verl.validate_config_rollout",
    scope=frozenset({"trainer"}),
    why="Under FSDP1 the gathering of a sync happens before the sync, where its time is lost.",
    how="Counts it towards the next sync's gather.",
    remove_when="verl logs the parts of a sync.",
)
