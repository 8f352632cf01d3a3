"""verl's own entry point in trainer mode stream_async: what it trains, and what it survives."""

import json

import pytest
import verl_job
from verl_job import STREAM, calls, end, live, metrics, said, start, trained

pytestmark = pytest.mark.verl


@pytest.mark.full
def test_groups_are_trained_on_as_they_end(world, tmp_path):
    """The reference model, importance weights and rollouts in fp8 take part."""
    extra = (
        "actor_rollout_ref.actor.use_kl_loss=True",
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
    )
    output = trained(world, tmp_path, *STREAM, *extra, FLASHPATCH="cpu,fp8,grpo,fsdp")
    assert metrics(output, "training/global_step") == [1, 2]
    assert metrics(output, "actor/samples") == [32, 32]
    assert min(metrics(output, "stream/rounds")) >= 2
    assert min(metrics(output, "actor/grad_norm")) > 0
    assert metrics(output, "stream/staleness/0")[0] == 1
    assert all(value > 0 for value in metrics(output, "actor/kl_loss")[1:])
    assert len(metrics(output, "rollout_corr/rollout_is_mean")) == 2
    assert max(metrics(output, "training/rollout_probs_diff_max")) < 0.2
    processes = live(tmp_path)
    for patch in ("grpo.verl.get_trainer_cls", "grpo.verl.generate_whole", "grpo.verl.generate_part"):
        assert calls(processes, patch) > 0, patch


@pytest.mark.full
def test_a_killed_job_goes_on_from_its_checkpoint(world, tmp_path):
    """No sample is trained on twice, and the reference is what it was; it goes with the actor's old checkpoints."""
    extra = (
        *"actor_rollout_ref.actor.use_kl_loss=True trainer.total_training_steps=5 trainer.n_gpus_per_node=2".split(),
        *f"trainer.save_freq=1 trainer.max_actor_ckpt_to_keep=2 trainer.default_local_dir={tmp_path}/saved".split(),
        f"trainer.rollout_data_dir={tmp_path}/trained",
    )
    names = {"FLASHPATCH": "cpu,bf16,grpo", "config": "[grpo]\nreference_every = 2\n"}
    job = start(world, tmp_path / "first", *STREAM, *extra, **names)
    try:
        wait(job, tmp_path / "first", step=3)
    finally:
        end(job)
    first = said(tmp_path / "first")
    saved = int((tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text())
    output = trained(world, tmp_path / "second", *STREAM, *extra, **names)
    steps = metrics(output, "training/global_step")
    assert steps == [*range(saved + 1, 6)] != [], steps
    kept = {file.parts[-4] for file in (tmp_path / "saved").rglob("reference/rank_1_of_2.pt")}
    assert "global_step_5" in kept and "global_step_1" not in kept, kept
    lines = {int(file.stem): file.read_text().splitlines() for file in (tmp_path / "trained").glob("*.jsonl")}
    keys = [json.loads(line)["uid"] for of_step in lines.values() for line in of_step]
    assert len(keys) == len(lines) * 32 == len(set(keys))
    # the reference is the policy after step 2, and after step 4: there the divergence begins at zero again
    away = dict(zip(metrics(first, "training/global_step"), metrics(first, "actor/kl_loss"), strict=True))
    away |= dict(zip(steps, metrics(output, "actor/kl_loss"), strict=True))
    assert {*lines, saved} == {*away, saved} == {1, 2, 3, 4, 5}  # a killed job may not tell of what it saved
    assert {step: abs(kl) < 1e-3 for step, kl in away.items()} == {step: step % 2 == 1 for step in away}, away


def wait(job, folder, step: int) -> None:
    """Wait until a step has ended."""
    verl_job.wait(job, folder, lambda: step in metrics(said(folder), "training/global_step"), 600)
