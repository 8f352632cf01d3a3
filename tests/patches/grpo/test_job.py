"""Unmodified verl trains with this loss and router."""

import pytest
from verl_job import calls, live, metrics, trained

pytestmark = [pytest.mark.verl, pytest.mark.full]


def test_two_steps_with_this_loss_and_router(world, tmp_path):
    settings = (
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    )
    said = trained(world, tmp_path, *settings, FLASHPATCH="cpu,bf16,grpo")
    assert metrics(said, "training/global_step") == [1, 2]
    assert metrics(said, "actor/samples") == [32, 32] and min(metrics(said, "actor/grad_norm")) > 0
    assert "policy_loss.loss_mode=grpo_exact" in said and "streaming batcher is not used" in said
    processes = live(tmp_path)
    trainers = [one for one in processes if "trainer" in one["roles"]]
    for patch in ("register_policy_loss", "prepare_micro_batches"):
        assert calls(trainers, f"grpo.verl.{patch}") >= 4, patch
    for patch in ("get_router_handle", "init_global_load_balancer"):
        assert calls(processes, f"grpo.verl.{patch}") == 1, patch
    for patch in ("generate", "release_server"):
        assert calls(processes, f"grpo.verl.{patch}") == 64, patch
