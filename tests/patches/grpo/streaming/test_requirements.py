"""What the mode cannot train with is named, and other modes are left alone."""

from __future__ import annotations

import pytest

from flashpatch.patches.grpo.streaming import requirements

FITS = {
    "trainer.v1.trainer_mode": "stream_async",
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "data.train_batch_size": 8,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
}


def refused(**changes):
    settings = FITS | {name.replace("__", "."): value for name, value in changes.items()}
    return list(requirements.refusals(lambda path, default=None: settings.get(path, default)))


def test_a_job_that_fits_is_let_through():
    assert refused() == []


@pytest.mark.parametrize(
    "path, value, reason",
    [
        ("algorithm.adv_estimator", "gae", "whole batch"),
        ("algorithm.adv_estimator", "reinforce_plus_plus", "whole batch"),
        ("critic.enable", True, "values"),
        ("trainer.critic_warmup", 2, "no critic"),
        ("algorithm.use_kl_in_reward", True, "use_kl_loss"),
        ("algorithm.rollout_correction.rollout_is_batch_normalize", True, "whole batch"),
        ("actor_rollout_ref.actor.ppo_epochs", 2, "once"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 4, "one optimizer step"),
        ("actor_rollout_ref.rollout.nnodes", 0, "devices of their own"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend", "naive", "nccl"),
        ("actor_rollout_ref.actor.strategy", "megatron", "fsdp"),
        ("actor_rollout_ref.model.lora_rank", 8, "not supported"),
        ("distillation.enabled", True, "not supported"),
        ("reward.reward_model.enable", True, "enable_resource_pool"),
    ],
)
def test_what_needs_more_than_a_group_is_named(path, value, reason):
    (problem,) = refused(**{path.replace(".", "__"): value})
    assert problem.startswith(path.rsplit(".", 1)[0]) and reason in problem


def test_other_modes_are_left_alone():
    assert refused(trainer__v1__trainer_mode="sync", algorithm__adv_estimator="gae") == []
