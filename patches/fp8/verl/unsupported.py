"""Refuse, before anything starts, settings of rollouts whose weights could not be followed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from typing import Any

from flashpatch.patches._shared.verl_config import Get, JobConfig, validate_config_patch
from flashpatch.patches.fp8.verl import delta_sync
from flashpatch.record import Contract

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
ID = "fp8.verl.validate_config_rollout"


def on_validate(original, config: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse what the update of a rollout, or a sync of differences, does not support.

    Raises:
        PatchError: settings are not supported; all are named.
    """
    job = JobConfig(config, ID)
    job.refuse(
        refusals(job.get),
        "rollouts on SGLang cannot be updated with",
        "Change these settings, or take fp8 (int8, bf16) out of FLASHPATCH.",
    )
    result = original(config, *args, **kwargs)
    if delta_sync.is_on():  # other families may have chosen the backend by now
        job.refuse(
            without_differences(job.get),
            "delta_sync does not go with",
            "Change these settings, or set delta_sync=False.",
        )
    return result


def refusals(get: Get) -> Iterator[str]:
    """Yield the settings that are not supported, each with the reason."""
    if get(f"{ROLLOUT}.qat.enable"):
        yield f"{ROLLOUT}.qat.enable=True (verl writes NVFP4 weights into the layers by itself, past the update)"
    if get(f"{ROLLOUT}.name") != "sglang":
        return
    size = get(f"{ROLLOUT}.data_parallel_size", 1)
    if size not in (None, 1):
        yield f"{ROLLOUT}.data_parallel_size={size} (one engine per replica takes tensors; use several replicas)"
    if get(f"{ROLLOUT}.disaggregation.enabled"):
        yield f"{ROLLOUT}.disaggregation.enabled=True (prefill and decode servers would be updated one by one)"
    backend = get(f"{ROLLOUT}.checkpoint_engine.backend")
    if backend == "delta_sharded":
        yield f"{ROLLOUT}.checkpoint_engine.backend={backend} (it writes past the model's loader)"
    for path in ("lora_rank", "lora.rank"):
        rank = get(f"{MODEL}.{path}")
        reason = _never_sent_adapters(backend) if rank and not get(f"{MODEL}.lora.merge") else ""
        if reason:
            yield f"{MODEL}.{path}={rank} ({reason}; {MODEL}.lora.merge=True goes)"


def _never_sent_adapters(backend: Any) -> str:
    """Return why LoRA adapters do not reach rollouts on the installed SGLang, or an empty string."""
    if backend not in (None, "naive"):
        return f"adapters never travelled to SGLang through {ROLLOUT}.checkpoint_engine.backend={backend}"
    if metadata.version("sglang").startswith("0.5.12"):
        return "verl's request for adapters is one of newer versions than SGLang 0.5.12"
    return ""


def without_differences(get: Get) -> Iterator[str]:
    """Yield the settings with which no differences can be sent, each with the reason."""
    backend = get(f"{ROLLOUT}.checkpoint_engine.backend")
    reasons = {
        None: "trainer and rollouts share their processes, and nothing travels",
        "naive": "trainer and rollouts share their processes, and nothing travels",
        "delta_sharded": "it sends differences by a wire of its own, past the update's transaction",
        "mooncake": "it casts whatever it carries",
        "kimi_ckpt_engine": "it casts whatever it carries",
    }
    if backend in reasons:
        yield f"{ROLLOUT}.checkpoint_engine.backend={backend} ({reasons[backend]})"
    for path in ("lora_rank", "lora.rank"):
        rank = get(f"{MODEL}.{path}")
        if rank and not get(f"{MODEL}.lora.merge"):
            yield f"{MODEL}.{path}={rank} (adapters are all that travels)"


PATCH = validate_config_patch(
    id=ID,
    requires="verl>=0.9",
    wrapper=on_validate,
    contract=Contract(
        params=("config",),
        exists=(
            "verl.workers.config.rollout:RolloutConfig.data_parallel_size",
            "verl.workers.config.rollout:RolloutConfig.disaggregation",
        ),
    ),
    evidence="optional",
    when="anywhere=fp8.verl.compute_old_log_prob",
    why="Some settings bring weights by ways that an update cannot follow, or fail minutes later.",
    how="Refuses them by name in the driver, before anything starts.",
    remove_when="never: it states what the family can run.",
)
