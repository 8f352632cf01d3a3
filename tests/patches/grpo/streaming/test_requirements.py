"""What the mode cannot train with is named, and other modes are left alone."""

import pytest

from flashpatch.patches.grpo import verl_config

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
    return list(verl_config.stream_refusals(lambda path, default=None: settings.get(path, default)))


def test_a_job_that_fits_is_let_through_and_other_modes_are_left_alone():
    assert refused() == []
    assert refused(trainer__v1__trainer_mode="sync", algorithm__adv_estimator="gae") == []


@pytest.mark.parametrize(
    "path, value, reason",
    [
        ("algorithm.adv_estimator", "gae", "whole batch"),
        ("critic.enable", True, "values"),
        ("trainer.v1.sampler.custom_sampler.name", "Mine", "nothing asks it"),
        ("actor_rollout_ref.rollout.agent.agent_loop_manager_class", "a.Mine", "nothing asks it"),
        ("skip.rollout_tq.enable", True, "nothing asks it"),
        ("trainer.v1.separate_async.hybrid_rollout.enable_switch", True, "nothing asks it"),
        ("trainer.v1.stream_async", {"parameter_sync_step": 4}, "separate_async.num_warmup_batches"),
        ("trainer.v1.stream_async", 1, "separate_async.num_warmup_batches"),
        ("actor_rollout_ref.model.mtp.enable_train", True, "not supported"),
        ("actor_rollout_ref.rollout.disaggregation.enabled", True, "not supported"),
        ("actor_rollout_ref.rollout.full_determinism", True, "in which they end"),
        ("trainer.critic_warmup", 2, "no critic"),
        ("algorithm.use_kl_in_reward", True, "use_kl_loss"),
        ("algorithm.rollout_correction.rollout_is_batch_normalize", True, "whole batch"),
        ("algorithm.rollout_correction.bypass_mode", True, "a loss of its own"),
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


def test_opo_is_refused_with_rejection_alone():
    """verl weighs its baseline by the tokens that rejection leaves: -0.333, 0.667 where this mode had -0.714, 0.286."""
    opo = {"algorithm__adv_estimator": "opo"}
    rejection = {"algorithm__rollout_correction__rollout_rs": "seq_mean_k1"}
    (problem,) = refused(**opo, **rejection)
    assert "adv_estimator=opo" in problem and "rollout_rs=seq_mean_k1" in problem
    assert refused(**opo) == [] and refused(**rejection) == []


@pytest.mark.verl
def test_only_opo_among_the_estimators_looks_at_what_rejection_left(scenario):
    """Advantages are computed before the forward, which alone can reject; a new estimator is noticed here."""
    told = scenario("""
        import json
        import numpy, torch
        from flashpatch.patches.grpo.verl_config import GROUP_LOCAL
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn
        from verl.trainer.config import AlgoConfig
        rewards = torch.zeros(4, 6)
        rewards[:, -1] = torch.tensor([1.0, 0.0, 2.0, 1.0])
        whole = torch.ones(4, 6)
        left = whole.clone()
        left[1, 2:] = left[2, 4:] = 0
        index = numpy.array(["a"] * 4, dtype=object)
        def advantages(name, mask):
            found = get_adv_estimator_fn(name)(token_level_rewards=rewards.clone(), response_mask=mask, index=index,
                                               config=AlgoConfig())
            return found[0][:, 0]
        differ = [one for one in GROUP_LOCAL if not torch.equal(advantages(one, whole), advantages(one, left))]
        print(json.dumps(differ))
        """)
    assert told.splitlines()[-1] == '["opo"]'


@pytest.mark.verl
def test_the_loss_that_another_family_chooses_last_is_judged_in_the_driver(scenario):
    told = scenario(
        """
        from omegaconf import OmegaConf
        from flashpatch import PatchError
        from flashpatch.patches.grpo import verl_config
        job = {path: value for path, value in SETTINGS.items()} | {"actor_rollout_ref.actor.entropy_coeff": 0.1}
        config = OmegaConf.create()
        for path, value in job.items():
            OmegaConf.update(config, path, value, force_add=True)
        def choose(config, *args):
            OmegaConf.update(config, verl_config.LOSS, "sapo", force_add=True)
        try:
            verl_config.validate_config(choose, config)
        except PatchError as error:
            print(error)
        """.replace("SETTINGS", repr(FITS))
    )
    assert "loss_mode=sapo with loss_agg_mode=token-mean and entropy_coeff=0.1" in told
