"""Refuse settings of verl's configuration that the audit does not cover, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashpatch import engine, registry
from flashpatch.arming.preflight import examine
from flashpatch.decorate import Patches
from flashpatch.patches._shared.verl_config import TARGET, Get, JobConfig, door, forbidden

ROLE = "actor_rollout_ref"
CARRIERS = ("naive", "nccl", "hccl", "nixl", "gloo")
"""The checkpoint engines that send each tensor unchanged, verl's and FlashPatch's gloo; mooncake and kimi cast all to one dtype."""
TRANSFER = {
    "vllm": ("fp8.verl_vllm.receiver_init_socket",),
    "sglang": (
        "fp8.verl_sglang.update_weights_from_tensor",
        "fp8.verl_sglang_0_5_12.update_weights_from_tensor",
    ),
}
"""By rollout.name: ids of patches, for different versions, of which one reports a refused update to the trainer. Families import no other."""


patches = Patches("fsdp", "verl>=0.7", scope="driver", evidence="install")


@patches.wrap(
    TARGET,
    relies_on="config.actor_rollout_ref.actor.strategy",
    why="An audit that does not cover the weights sent looks like one that found no difference.",
    remove_when="never: it states what the audit covers.",
)
def validate_config(original, config: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse, before anything starts, rollouts, strategies, transports and merged adapters that the audit does not cover.

    Raises PatchError if weights travel in a way that the audit does not cover; all such settings are named."""
    job = JobConfig.open(config, patches.of(validate_config).id)
    mode = engine.options("fsdp")["audit"]
    refused = list(refusals(job.get, mode))
    if mode == "refuse" and (missing := _missing_error_path(job.get)):
        refused.append(f"{missing} (stock verl's trainer does not hear of a refused update)")
    job.refuse(
        refused,
        "the audit of weight syncs does not cover",
        "Change these settings, or set the option audit of fsdp to report or off.",
    )
    return original(config, *args, **kwargs)


door(patches)


def _missing_error_path(get: Get) -> str | None:
    """Say what is missing for a refused update to reach the trainer; None if nothing is."""
    if not engine.enabled("fp8"):
        return "FLASHPATCH without bf16 or fp8"
    transfer = TRANSFER.get(get(f"{ROLE}.rollout.name") or "vllm")
    if transfer is None:  # refused by its name
        return None
    problems = [examine(registry.patch(one)).problem for one in transfer]
    if not all(problems):
        return None
    return f"a verl on which {transfer[0]} cannot be armed: {problems[0]}"


def refusals(get: Get, mode: str) -> Iterator[str]:
    """Yield the settings that the audit, in the option's ``mode``, does not cover, each with the reason. With mode
    "report", weights that cannot be traced back to shards are sent unaudited, which is logged then."""
    if mode == "off":
        return
    rollout = get(f"{ROLE}.rollout.name")
    if rollout not in (None, *TRANSFER):
        yield f"{ROLE}.rollout.name={rollout} (the audit runs in vllm's worker and sglang's scheduler)"
    if rollout == "sglang" and get(f"{ROLE}.rollout.quantization") == "fp8":
        yield f"{ROLE}.rollout.quantization=fp8 (verl quantizes for sglang before it sends)"
    adapters = [path for path in ("lora_rank", "lora.rank") if get(f"{ROLE}.model.{path}")]
    if rollout == "sglang" and adapters and not get(f"{ROLE}.model.lora.merge"):
        yield f"{ROLE}.model.{adapters[0]} on sglang (an adapter comes past the session that is audited)"
    strategy = get(f"{ROLE}.actor.strategy")
    if strategy not in (None, "fsdp", "fsdp2"):
        yield f"{ROLE}.actor.strategy={strategy} (the audit reads the shards of fsdp and fsdp2)"
    backend = get(f"{ROLE}.rollout.checkpoint_engine.backend")
    if backend not in (None, *CARRIERS):
        yield f"{ROLE}.rollout.checkpoint_engine.backend={backend} (it casts weights or sends differences)"
    if mode != "refuse":
        return
    if adapters and get(f"{ROLE}.model.lora.merge"):
        yield f"{ROLE}.model.{adapters[0]} with lora.merge=True (merged weights are in no shard)"
    yield from forbidden(get, {f"{ROLE}.actor.fsdp_config.qat.enable": "quantized weights are sent"})
