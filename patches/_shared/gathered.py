"""Free the weights that FSDP has gathered and kept after a forward."""

from __future__ import annotations

from typing import Any


def free(module: Any) -> None:
    """Free whole weights that a forward has gathered and kept, so that the next one gathers the shards as they are by then.

    FSDP1 keeps those of its outermost unit, embeddings, last norm and head; FSDP2, if told to, those of any unit."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
        elif isinstance(unit, FullyShardedDataParallel) and hasattr(unit._flat_param, "_full_param_padded"):
            unit._handle.reshard(free_unsharded_flat_param=True)
