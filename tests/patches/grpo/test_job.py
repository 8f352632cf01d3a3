"""Unmodified verl trains with this loss and router, and learns as stock GRPO does where both should agree."""

from pathlib import Path

import pytest
from verl_job import live, metrics, trained

pytestmark = [pytest.mark.verl, pytest.mark.full]


def learn(world: Path, folder: Path, names: str, *extra: str) -> str:
    """Train for two steps; what the job said."""
    settings = (
        "data.seed=1",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    )
    return trained(world, folder, *settings, *extra, FLASHPATCH=names)


def test_two_steps_with_this_loss_and_router(world, tmp_path):
    said = learn(world, tmp_path, "cpu,bf16,grpo")
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


def test_an_equal_seed_gives_the_curve_of_stock_grpo(world, tmp_path):
    """No sample is missing here, so the counts agree with the configuration, and the losses with one another.

    Each group is one response of the likeliest tokens: vLLM's reproducible sampling needs Triton.
    """
    same = (
        "actor_rollout_ref.rollout.top_k=1",
        "actor_rollout_ref.rollout.n=1",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    )
    stock = learn(world, tmp_path / "stock", "cpu,bf16", *same)
    ours = learn(world, tmp_path / "ours", "cpu,bf16,grpo", *same)
    for name in ("critic/rewards/mean", "response_length/mean", "actor/grad_norm", "actor/pg_loss"):
        wanted, found = metrics(stock, name), metrics(ours, name)
        assert len(wanted) == 2 and found == pytest.approx(wanted, rel=1e-3, abs=1e-5), name
