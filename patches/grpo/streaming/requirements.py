"""Name the settings with which groups cannot be trained on as they end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flashpatch import engine
from flashpatch.patches._shared.verl_config import Get
from flashpatch.patches.grpo.streaming import MODE, divisor

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
GROUP_LOCAL = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo")
"""Advantage estimators that need a sample's own group and no other."""


def asked(get: Get) -> bool:
    """Whether the job is to run in this mode."""
    return bool(get("trainer.use_v1", True)) and get("trainer.v1.trainer_mode") == MODE


def refusals(get: Get) -> Iterator[str]:
    """Yield the settings that contradict the mode, each with the reason; none for other modes."""
    if asked(get):
        yield from _whole_batch(get)
        yield from _places(get)


def loss_refusals(get: Get, registry: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the actor's loss cannot be streamed; nothing for other modes, or a loss that no registry here has.

    Args:
        get: reads the configuration, once every family has set what it needs.
        registry: verl's ``POLICY_LOSS_REGISTRY``.
    """
    if asked(get):
        why = divisor.problem(lambda path, default=None: get(f"{ACTOR}.{path}", default), registry)
        if why is not None:
            yield f"{ACTOR}.{why}"


def _whole_batch(get: Get) -> Iterator[str]:
    """Yield what needs the whole batch before its first gradient."""
    estimator = get("algorithm.adv_estimator", "gae")
    if estimator not in GROUP_LOCAL:
        yield f"algorithm.adv_estimator={estimator} (advantages need the whole batch; use {', '.join(GROUP_LOCAL)})"
    if get("critic.enable"):
        yield "critic.enable=True (values need the whole batch)"
    if get("trainer.critic_warmup", 0):
        yield f"trainer.critic_warmup={get('trainer.critic_warmup')} (there is no critic)"
    if get("algorithm.use_kl_in_reward"):
        yield "algorithm.use_kl_in_reward=True (use actor.use_kl_loss)"
    if get("algorithm.rollout_correction.bypass_mode"):
        yield "algorithm.rollout_correction.bypass_mode=True (the policy's own log-probabilities cost nothing here)"
    if estimator == "opo" and get("algorithm.rollout_correction.rollout_rs"):
        yield (
            f"algorithm.adv_estimator=opo with rollout_rs={get('algorithm.rollout_correction.rollout_rs')} (its baseline "
            "weighs responses by the tokens that rejection leaves, which is known after the forward alone; use grpo or "
            "rloo, or no rollout_rs)"
        )
    if get("algorithm.rollout_correction.rollout_is_batch_normalize"):
        yield "algorithm.rollout_correction.rollout_is_batch_normalize=True (a mean over the whole batch)"
    epochs, mini, batch = (
        get(f"{ACTOR}.ppo_epochs", 1),
        get(f"{ACTOR}.ppo_mini_batch_size"),
        get("data.train_batch_size"),
    )
    if epochs != 1:
        yield f"{ACTOR}.ppo_epochs={epochs} (each group is trained on once, as it comes; use 1)"
    if mini != batch:
        yield f"{ACTOR}.ppo_mini_batch_size={mini} (one optimizer step per version; use data.train_batch_size, {batch})"


def _places(get: Get) -> Iterator[str]:
    """Yield what is not where the mode needs it."""
    for path in (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"):
        if not get(path):
            yield f"{path}={get(path)} (rollouts need devices of their own)"
    engine_path = f"{ROLLOUT}.checkpoint_engine.backend"
    if get(engine_path, "naive") in (None, "naive") and not engine.enabled("cpu"):
        yield f"{engine_path}=naive (it cannot reach another process; use nccl, nixl or mooncake)"
    strategy = get(f"{ACTOR}.strategy")
    if strategy not in (None, "fsdp", "fsdp2"):
        yield f"{ACTOR}.strategy={strategy} (use fsdp or fsdp2)"
    for path in ("lora_rank", "lora.rank", "lora_adapter_path"):
        if get(f"actor_rollout_ref.model.{path}"):
            yield f"actor_rollout_ref.model.{path}={get(f'actor_rollout_ref.model.{path}')} (not supported here)"
    if get("distillation.enabled"):
        yield "distillation.enabled=True (not supported here)"
    if get("reward.reward_model.enable") and not get("reward.reward_model.enable_resource_pool"):
        yield "reward.reward_model.enable_resource_pool=False (rollouts never pause for it; use True)"
