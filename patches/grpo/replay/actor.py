"""Replay the experts that the rollout's engine chose in the FSDP actor, if verl carries them."""

from __future__ import annotations

import functools
import logging
from typing import Any

from flashpatch.patches.grpo.replay import routers
from flashpatch.patches.grpo.replay.routers import Replay, stop
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.grpo")

IMPL = "verl.workers.engine.fsdp.transformer_impl"
WORKERS = "verl.workers.engine_workers"
FLAG = "enable_routing_replay"
STRATEGIES = ("fsdp", "fsdp2")
KEPT = "_flashpatch_replay"


def on_worker(original, self, config: Any, role: str, *args: Any, **kwargs: Any) -> None:
    """Around ``ActorRolloutRefWorker.__init__``: let the worker mark batches for replay under FSDP as under Megatron."""
    original(self, config, role, *args, **kwargs)
    rollout = config.get("rollout") or {}
    if (
        "actor" in role
        and config.actor.strategy in STRATEGIES
        and rollout.get("enable_rollout_routing_replay")
    ):
        self.enable_routing_replay = True


def on_batch(original, self, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``FSDPEngine.forward_backward_batch``: replay in the batches that the worker marked, and in no other.

    The reference is left to its own routing: verl marks its batches so, but not those that the actor computes without
    its adapter.
    """
    from verl.utils import tensordict_utils as tu

    asked = self.engine_config.strategy in STRATEGIES and tu.get_non_tensor_data(data, FLAG, default=False)
    if not asked or tu.get_non_tensor_data(data, "no_lora_adapter", default=False):
        return original(self, data, *args, **kwargs)
    replay = Replay(self.module)
    logger.info("replaying the engine's experts in %d routers", len(replay.layers))
    setattr(self, KEPT, replay)
    try:
        return original(self, data, *args, **kwargs)
    finally:  # not earlier: recomputed layers route again in the backward pass
        delattr(self, KEPT)
        replay.remove()


def on_step(original, self, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``FSDPEngineWithLMHead.forward_step``: give the routers this micro-batch's record.

    Raises:
        PatchError: the record does not fit the model or the tokens, or a router was not called.
    """
    replay = getattr(self, KEPT, None)
    if replay is None:
        return original(self, micro_batch, *args, **kwargs)
    rank, ranks = 0, 1
    if self.use_ulysses_sp:
        from torch import distributed

        group = self.ulysses_parallel_group
        rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    replay.begin(*record(micro_batch), rank, ranks)
    result = original(self, micro_batch, *args, **kwargs)
    replay.check()
    return result


def record(micro_batch: Any) -> tuple[Any, Any]:
    """Return the recorded experts in the order of the model's tokens, and which tokens must have some.

    Args:
        micro_batch: what ``FSDPEngineWithLMHead.prepare_model_inputs`` gets; ``routed_experts`` is jagged like
            ``input_ids``, ``(batch, tokens, layers, top_k)``.

    Returns:
        ``(tokens, layers, top_k)`` and ``(tokens,)``: packed, or with each sequence padded at its end to the longest.

    Raises:
        PatchError: verl carried no record, or one of other lengths.
    """
    import torch
    from verl.utils import tensordict_utils as tu

    experts = micro_batch.get("routed_experts", None)
    if experts is None or not experts.is_nested:
        raise stop("the batch has no routed_experts of the engine beside its tokens")
    lengths = micro_batch["input_ids"].offsets().diff().tolist()
    if experts.offsets().diff().tolist() != lengths:
        raise stop("the record of experts has other lengths than the tokens")
    needed = [torch.arange(length) < end for length, end in zip(lengths, _ends(micro_batch), strict=True)]
    if tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
        return experts.values(), torch.cat(needed)
    longest = max(lengths)
    rows = experts.values().new_zeros((len(lengths), longest, *experts.values().shape[1:]))
    must = torch.zeros((len(lengths), longest), dtype=torch.bool)
    parts = experts.values().split(lengths)
    for index, length in enumerate(lengths):
        rows[index, :length] = parts[index]
        must[index, :length] = needed[index]
    return rows.flatten(0, 1), must.flatten()


def _ends(micro_batch: Any) -> list[int]:
    """Return the position of the last token that is trained on, by sequence; 0 if there is none."""
    prompts, mask = micro_batch["prompts"], micro_batch["loss_mask"]
    if prompts.is_nested:
        starts = prompts.offsets().diff().tolist()
    else:
        starts = micro_batch["attention_mask"][:, : prompts.shape[1]].sum(1).tolist()
    ends = []
    for start, row in zip(starts, mask.unbind(), strict=True):
        trained = row.nonzero()
        ends.append(int(start + trained.max()) if len(trained) else 0)
    return ends


_patch = functools.partial(
    Patch,
    requires="verl>=0.9",
    evidence="optional",
    scope=frozenset({"trainer"}),
    why="verl carries the experts that the engine chose to the trainer (rollout.enable_rollout_routing_replay), where only "
    "Megatron and VeOmni use them: an FSDP actor routes anew, and tokens near a tie get other experts than answered.",
    remove_when="verl's FSDP engine replays routed_experts.",
)

WORKER = _patch(
    id="grpo.verl.actor_rollout_ref_worker_init",
    targets=(f"{WORKERS}:ActorRolloutRefWorker.__init__",),
    wrapper=on_worker,
    contract=Contract(
        params=("self", "config", "role"),
        mentions=("self.enable_routing_replay",),
        exists=(f"{WORKERS}:_with_routing_replay_flag",),
    ),
    how="With that setting and an FSDP actor, lets the worker mark the actor's batches for replay, as it does for Megatron.",
)

BATCH = _patch(
    id="grpo.verl.forward_backward_batch",
    targets=(f"{IMPL}:FSDPEngine.forward_backward_batch",),
    wrapper=on_batch,
    contract=Contract(
        params=("self", "data", "loss_function", "forward_only"), mentions=("self.forward_step",)
    ),
    how="Hooks the model's routers while a marked batch runs, its backward pass included, and takes the hooks off.",
)

STEP = _patch(
    id=routers.ID,
    targets=(routers.TARGET,),
    wrapper=on_step,
    contract=Contract(
        params=("self", "micro_batch"),
        mentions=("self.prepare_model_inputs", "self.module"),
        exists=(
            f"{IMPL}:FSDPEngineWithLMHead.prepare_model_inputs",
            "verl.utils.ulysses:ulysses_pad_and_slice_inputs",
        ),
    ),
    how="Gives the routers the recorded experts of the micro-batch, packed or padded, or this rank's part; the weights "
    "come from live logits. Stops if a recorded layer was not routed, or a token up to the last trained one has no record.",
)

PATCHES = (WORKER, BATCH, STEP)
