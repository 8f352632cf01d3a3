"""verl's own entry point in trainer mode stream_async: what it trains, and what it survives."""

from __future__ import annotations

import time

import pytest
from machine import limit
from verl_job import end, live, metrics, said, start, train

pytestmark = pytest.mark.verl

STREAM = """
trainer.v1.trainer_mode=stream_async
actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=1
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=200
""".split()


def test_groups_are_trained_on_as_they_end(world, tmp_path):
    """The reference model, importance weights and rollouts in fp8 take part."""
    extra = (
        "actor_rollout_ref.actor.use_kl_loss=True",
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
    )
    done = train(world, tmp_path, *STREAM, *extra, FLASHPATCH="cpu,fp8,grpo,fsdp")
    assert done.returncode == 0, done.stdout[-8000:]
    assert metrics(done.stdout, "training/global_step") == [1, 2]
    assert metrics(done.stdout, "actor/samples") == [32, 32]
    assert min(metrics(done.stdout, "stream/rounds")) >= 2
    assert min(metrics(done.stdout, "actor/grad_norm")) > 0
    assert metrics(done.stdout, "stream/staleness/0")[0] == 1
    assert all(value > 0 for value in metrics(done.stdout, "actor/kl_loss")[1:])
    assert len(metrics(done.stdout, "rollout_corr/rollout_is_mean")) == 2
    assert max(metrics(done.stdout, "training/rollout_probs_diff_max")) < 0.2
    driver = next(
        one
        for one in live(tmp_path)
        if "driver" in one["roles"] and "grpo.verl.get_trainer_cls" in one["patches"]
    )
    assert driver["patches"]["grpo.verl.get_trainer_cls"]["calls"] > 0


@pytest.mark.full
def test_a_lost_server_and_a_lost_agent_worker_lose_no_sample(world, tmp_path):
    extra = (
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "trainer.total_training_steps=5",
        "data.max_response_length=64",
        "actor_rollout_ref.rollout.max_model_len=128",
    )
    job = start(world, tmp_path, *STREAM, *extra, FLASHPATCH="cpu,bf16,grpo")
    try:
        kill(job, tmp_path, after=1, name="ray::AgentLoopWorkerTQ")
        kill(job, tmp_path, after=2, name="ray::vLLMHttpServer")
        assert job.wait(limit(900)) == 0, said(tmp_path)[-8000:]
    finally:
        end(job)
    log = said(tmp_path)
    assert metrics(log, "training/global_step") == [1, 2, 3, 4, 5]
    assert metrics(log, "actor/samples") == [32] * 5
    assert "agent loop worker are dispatched again" in log and "is lost" in log


def kill(job, folder, after: int, name: str) -> None:
    """SIGKILL one of the job's processes of this name when a step has ended."""
    import psutil

    deadline = time.monotonic() + limit(600)
    while after not in metrics(said(folder), "training/global_step"):
        assert job.poll() is None and time.monotonic() < deadline, said(folder)[-8000:]
        time.sleep(0.2)
    found = [
        one for one in psutil.Process(job.pid).children(recursive=True) if name in " ".join(one.cmdline())
    ]
    found[0].kill()
