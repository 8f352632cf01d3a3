"""Mend verl's trainer mode ``separate_async``, where trainer and rollouts are separate processes, on a CPU."""

from __future__ import annotations

import functools
import logging
from collections.abc import MutableMapping
from typing import Any

from flashpatch.record import Contract, Patch

TRAINER = "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync"
SAVE_SHARDS = "verl.utils.fsdp_utils:fsdp2_sharded_save_to_cpu"


class _WithoutFlush(logging.LoggerAdapter):
    """Accept print's keyword ``flush`` in the methods of a logger, and leave it out."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs.pop("flush", None)
        return msg, kwargs


def on_setup(original, self) -> None:
    """Around ``_setup``: the module's logger takes ``flush`` during the call."""
    names = original.__globals__
    logger = names["logger"]
    names["logger"] = _WithoutFlush(logger, {})
    try:
        return original(self)
    finally:
        names["logger"] = logger


def on_save(original, model: Any) -> tuple[dict[str, tuple[Any, Any]], Any]:
    """Around ``fsdp2_sharded_save_to_cpu``: copy what shares memory with the model's parameters.

    Returns:
        verl's: name to the shard on the CPU and its DTensor specification, and the first specification.
    """
    from torch.distributed.tensor import DTensor

    saved, spec = original(model)
    local = {name: p._local_tensor if isinstance(p, DTensor) else p for name, p in model.named_parameters()}

    def own(name: str, shard: Any) -> Any:
        shared = shard.untyped_storage().data_ptr() == local[name].untyped_storage().data_ptr()
        return shard.clone() if shared else shard

    return {name: (own(name, shard), of) for name, (shard, of) in saved.items()}, spec


_patch = functools.partial(
    Patch, requires="verl>=0.9", evidence="optional", needs=("cpu.verl.register_platform",)
)

SETUP = _patch(
    id="cpu.verl.separate_async_setup",
    targets=(f"{TRAINER}._setup",),
    wrapper=on_setup,
    contract=Contract(
        mentions=("logger.info", "self._enable_hybrid_replicas", "self.standalone_checkpoint_manager")
    ),
    scope=frozenset({"driver"}),
    why="With actor_rollout_ref.hybrid_engine=False, which leaves rollouts out of the trainer's processes, the trainer "
    "ends in a TypeError: it logs with print's keyword flush.",
    how="Gives the module, while it sets up, a logger that takes the keyword and leaves it out.",
    remove_when="verl logs this line without flush.",
)

SAVE = _patch(
    id="cpu.verl.fsdp2_sharded_save_to_cpu",
    targets=(SAVE_SHARDS,),
    wrapper=on_save,
    contract=Contract(params=("model",), mentions=("param._local_tensor", "detach")),
    scope=frozenset({"trainer"}),
    why="With several mini-batches between two weight updates, the trainer keeps the policy that drew the samples on the "
    "CPU; of parameters that are there already verl keeps no copy, so training changes it too, and importance ratios "
    "are 1 where they are not.",
    how="Copies shards that share memory with the model's parameters.",
    remove_when="verl copies the shards on the CPU too, as it does for FSDP1.",
)
