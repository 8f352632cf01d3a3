"""Let verl save and exchange a policy as it is: free what FSDP has gathered and kept after a forward, and save copies."""

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
    """Add a patch that does both where verl's asynchronous trainers put another policy's shards in place."""

    def get_strategy_handlers(original: Any, self: Any) -> Any:
        """Free gathered weights before verl saves a policy's shards, and before it puts saved ones in place; save copies."""
        from flashpatch.patches._shared import streams

        save, restore = handlers = original(self)
        strategy = self.config.actor.strategy
        if strategy not in ("fsdp", "fsdp2", "veomni"):  # the last is FSDP2 too
            return handlers

        def fresh(handle: Callable[..., Any]) -> Callable[..., Any]:
            def call(model: Any, *saved: Any) -> Any:
                free(model)
                streams.settle()
                return handle(model, *saved)

            return call

        def copied(model: Any) -> Any:
            shards, spec = save(model)
            held = {getattr(shard, "_local_tensor", shard).data_ptr() for shard in model.parameters()}
            return {
                name: (shard.clone() if shard.data_ptr() in held else shard, of)
                for name, (shard, of) in shards.items()
            }, spec

        return fresh(save if strategy == "fsdp" else copied), fresh(restore)

    patches.wrap(
        f"{WORKER}._get_strategy_handlers",
        relies_on=(
            f"{WORKER}.save_model_to_cpu",
            f"{WORKER}.restore_model_from_cpu",
            "self.config.actor.strategy",
        ),
        evidence="optional",  # of trainer modes with rollouts apart, and several updates between two syncs, alone
        why="FSDP keeps gathered weights after a forward. With those the next one computes, and trains, though verl has "
        "put other shards in place; FSDP2 then has no shards to save. Of FSDP2's shards on the host (offload, or no "
        "accelerator) verl keeps no copy: training changes what was saved, and what is put back undoes the last updates.",
        remove_when="verl reshards a model before it saves and restores its shards, and copies those on the host.",
    )(get_strategy_handlers)
