"""Average gradients over replicas in hybrid sharding if a shard group has one rank.

torch's FSDP1 turns any strategy into ``NO_SHARD`` when its shard group has one rank
(``torch/distributed/fsdp/_init_utils.py: _init_core_state``), and ``NO_SHARD`` averages gradients over that
group, that is, not at all: with ``fsdp_size=1`` each of verl's ranks trains a model of its own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flashpatch.record import Contract, Patch

UTILS = "verl.workers.engine.fsdp.utils"
IMPL = "verl.workers.engine.fsdp.transformer_impl"
ID = "fsdp.verl.get_sharding_strategy"


def on_strategy(original, device_mesh: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``NO_SHARD`` for a mesh of n x 1 in ``get_sharding_strategy(device_mesh, ...)``.

    FSDP1 then takes the mesh's first dimension, that of the replicas, as the group it averages over. FSDP2
    looks at the mesh alone and is right without this.
    """
    if device_mesh.ndim == 2 and device_mesh.size(1) == 1 and device_mesh.size(0) > 1:
        from torch.distributed.fsdp import ShardingStrategy

        return ShardingStrategy.NO_SHARD
    return original(device_mesh, *args, **kwargs)


def native(site: Any) -> str | None:
    """verl's own hybrid sharding, if what it and torch make of a mesh of 2 x 1 still couples the two
    ranks."""
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp._init_utils import HYBRID_SHARDING_STRATEGIES

    mesh = SimpleNamespace(ndim=2, shape=(2, 1), size=lambda at=None: 2 if at is None else (2, 1)[at])
    asked = getattr(site.module, site.name)(mesh)
    if asked == ShardingStrategy.NO_SHARD:
        return f"{UTILS}.get_sharding_strategy"
    if asked in HYBRID_SHARDING_STRATEGIES and _kept(asked):
        return "torch's FSDP1, which keeps a hybrid strategy over shard groups of one rank"
    return None


def _kept(strategy: Any) -> bool:
    """Whether torch leaves a hybrid strategy alone whose shard group has one rank. Asks the function that
    decides, with a stand-in for the state that it fills in."""
    import warnings

    from torch.distributed.fsdp import _init_utils

    state = SimpleNamespace(world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _init_utils._init_core_state(state, strategy, None, None, True, False, 1, 1)
    except Exception:
        return False
    return state.sharding_strategy == strategy


PATCH = Patch(
    id=ID,
    targets=(f"{UTILS}:get_sharding_strategy",),
    requires="verl>=0.7",
    wrapper=on_strategy,
    native=native,
    contract=Contract(
        params=("device_mesh",),
        mentions=("device_mesh.ndim",),
        exists=(f"{UTILS}:create_device_mesh", f"{IMPL}:FSDPEngine._build_fsdp_module"),
    ),
    evidence="install",
    scope=frozenset({"trainer"}),
    why="With FSDP1, fsdp_size=1 and several ranks, torch averages gradients within shard groups of one "
    "rank, so that the replicas silently differ from the first step on.",
    how="Returns NO_SHARD for such a mesh, which FSDP1 then applies over the replicas. All other meshes "
    "are right and left to verl.",
    remove_when="torch's FSDP1 couples the replicas of a hybrid strategy whose shard group has one rank.",
)
