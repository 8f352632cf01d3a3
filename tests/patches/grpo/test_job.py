"""Unmodified verl trains with this loss and router."""

import pytest
from verl_job import live, metrics, trained

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

    def calls(patch: str, role: str) -> int:
        return sum(
            one["patches"].get(patch, {}).get("calls", 0)
            for one in processes
            if role in one["roles"] or not role
        )

    assert (
        calls("grpo.verl.register_policy_loss", "trainer") >= 4
        and calls("grpo.verl.prepare_micro_batches", "trainer") >= 4
    )
    assert calls("grpo.verl.get_router_handle", "") == 1 == calls("grpo.verl.init_global_load_balancer", "")
    assert calls("grpo.verl.generate", "") == 64 == calls("grpo.verl.release_server", "")
