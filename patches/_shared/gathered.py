"""Free the weights that FSDP has gathered and kept after a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashpatch.decorate import Patches

WORKER = "verl.experimental.separation.engine_workers:DetachActorWorker"


def free(module: Any) -> None:
    """Free whole weights that a forward has gathered and kept, so that the next one gathers the shards as they are by then.

    FSDP1 keeps those of its outermost unit, embeddings, last norm and head; FSDP2, if told to, those of any unit."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
        elif isinstance(unit, FullyShardedDataParallel) and hasattr(unit._flat_param, "_full_param_padded"):
            unit._handle.reshard(free_unsharded_flat_param=True)


def before_exchange(patches: Patches) -> None:
    """Add a patch that frees them where verl's asynchronous trainers put another policy's shards in place."""

    def get_strategy_handlers(original: Any, self: Any) -> Any:
        """Free gathered weights before verl saves a policy's shards, and before it puts saved ones in place."""
        handlers = original(self)
        if self.config.actor.strategy not in ("fsdp", "fsdp2"):
            return handlers

        def fresh(handle: Callable[..., Any]) -> Callable[..., Any]:
            def call(model: Any, *saved: Any) -> Any:
                free(model)
                return handle(model, *saved)

            return call

        return tuple(map(fresh, handlers))

    patches.wrap(
        f"{WORKER}._get_strategy_handlers",
        relies_on=(
            f"{WORKER}.save_model_to_cpu",
            f"{WORKER}.restore_model_from_cpu",
            "self.config.actor.strategy",
        ),
        evidence="optional",  # of trainer modes with rollouts apart, and several updates between two syncs, alone
        why="FSDP keeps gathered weights after a forward. With those the next one computes, and trains, though verl has "
        "put other shards in place; FSDP2 then has no shards to save.",
        remove_when="verl reshards a model before it saves and restores its shards.",
    )(get_strategy_handlers)
