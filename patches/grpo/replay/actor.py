"""Replay the experts that the rollout's engine chose in the FSDP actor, if verl carries them, and let verl read those that
SGLang recorded."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator
from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches._shared.prompt_lengths import prompt_lengths
from flashpatch.patches.grpo.replay import routers
from flashpatch.patches.grpo.replay.routers import Replay, stop

logger = logging.getLogger("flashpatch.grpo")

IMPL = "verl.workers.engine.fsdp.transformer_impl"
WORKERS = "verl.workers.engine_workers"
FLAG = "enable_routing_replay"
STRATEGIES = ("fsdp", "fsdp2")
KEPT = "_flashpatch_replay"
EXPERTS = "routed_experts"

patches = Patches(
    "grpo",
    "verl>=0.9",
    scope="trainer",
    evidence="optional",
    why="verl carries the experts that the engine chose to the trainer (rollout.enable_rollout_routing_replay), where only "
    "Megatron and VeOmni use them: an FSDP actor routes anew, and tokens near a tie get other experts than answered.",
    remove_when="verl's FSDP engine replays routed_experts.",
)


@patches.wrap(
    f"{WORKERS}:ActorRolloutRefWorker.__init__",
    relies_on=("self.enable_routing_replay", f"{WORKERS}:_with_routing_replay_flag"),
)
def actor_rollout_ref_worker_init(original, self, config: Any, role: str, *args: Any, **kwargs: Any) -> None:
    """Let the worker mark the actor's batches for replay, with that setting and an FSDP actor, as it does for Megatron."""
    original(self, config, role, *args, **kwargs)
    asked = (config.get("rollout") or {}).get("enable_rollout_routing_replay")
    if "actor" in role and config.actor.strategy in STRATEGIES and asked:
        self.enable_routing_replay = True


@patches.wrap(
    f"{IMPL}:FSDPEngine.forward_backward_batch",
    params=("self", "data", "loss_function", "forward_only"),
    relies_on="self.forward_step",
)
def forward_backward_batch(original, self, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook the model's routers while a marked batch runs, its backward pass included, and take the hooks off.

    The reference is left to its own routing: verl marks its batches so, but not those that the actor computes while its adapter
    is off."""
    from verl.utils import tensordict_utils as tu

    asked = self.engine_config.strategy in STRATEGIES and tu.get_non_tensor_data(data, FLAG, default=False)
    if not asked or any(getattr(one, "disable_adapters", None) is True for one in self.module.modules()):
        return original(self, data, *args, **kwargs)
    replay = Replay(self.module)
    logger.info("replaying the engine's experts in %d routers", len(replay.layers))
    setattr(self, KEPT, replay)
    try:
        return original(self, data, *args, **kwargs)
    finally:  # not earlier: recomputed layers route again in the backward pass
        delattr(self, KEPT)
        replay.remove()


@patches.wrap(
    routers.TARGET,
    relies_on=(
        "self.prepare_model_inputs",
        "self.module",
        f"{IMPL}:FSDPEngineWithLMHead.prepare_model_inputs",
        "verl.utils.ulysses:ulysses_pad_and_slice_inputs",
    ),
)
def forward_step(original, self, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Give the routers the recorded experts of the micro-batch, packed or padded, or this rank's part, with weights from
    live logits. Stop if a recorded layer was not routed, or a token up to the last trained one has no record.

    Raises PatchError if the record does not fit the model or the tokens, or a router was not called."""
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
        PatchError: verl carried no record, or one of other lengths."""
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
    ends = []
    for start, row in zip(
        prompt_lengths(micro_batch).tolist(), micro_batch["loss_mask"].unbind(), strict=True
    ):
        trained = row.nonzero()
        ends.append(int(start + trained.max()) if len(trained) else 0)
    return ends


class Record(str):
    """Hold SGLang's text of recorded experts; it is a ``str`` with a method more."""

    __slots__ = ("shape",)
    shape: tuple[int, int, int]

    def numpy(self) -> Any:
        """Return the experts, ``(tokens, layers, experts per token)``, int32."""
        import numpy

        return numpy.frombuffer(base64.b64decode(self), dtype=numpy.int32).reshape(self.shape)


@Patches("grpo", "sglang>=0.5.12", scope="driver", evidence="optional").wrap(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request",
    params=("obj", "request"),
    relies_on="sglang.srt.managers.io_struct:GenerateReqInput.return_routed_experts",
    why="SGLang returns recorded experts as text; verl takes them for a tensor, and every request of a job with "
    "rollout.enable_rollout_routing_replay ends with an AttributeError.",
    remove_when="verl decodes SGLang's record of experts.",
)
def generate_request(original, self, obj: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Give SGLang's text of recorded experts the method that verl calls; for all others it stays the text that it is."""
    outputs = original(self, obj, *args, **kwargs)
    if not getattr(obj, f"return_{EXPERTS}", False):
        return outputs
    config = self.model_config.hf_text_config
    return readable(outputs, (-1, config.num_hidden_layers, config.num_experts_per_tok))


async def readable(outputs: AsyncIterator[Any], shape: tuple[int, int, int]) -> AsyncIterator[Any]:
    """Yield the outputs, their experts as a `Record`."""
    async for output in outputs:
        found = output["meta_info"].get(EXPERTS) if isinstance(output, dict) else None
        if isinstance(found, str):
            output["meta_info"][EXPERTS] = record = Record(found)
            record.shape = shape
        yield output
