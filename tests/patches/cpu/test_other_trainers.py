"""Whole jobs of verl's trainers besides ``main_ppo``, and one of ``main_ppo``, that are killed and go on."""

import eagle_cotraining
import pytest
import verl_job
from verl_job import FULLY, live, metrics, trained

pytestmark = [pytest.mark.verl, pytest.mark.full]

ASYNCHRONOUS = "verl.experimental.fully_async_policy.fully_async_main"
ONE_STEP = "verl.experimental.one_step_off_policy.main_ppo"
CONFIG = "hydra.searchpath=[pkg://verl.trainer.config]"  # verl's is a path within its repository
SLOWLY = "actor_rollout_ref.actor.optim.lr=1e-3"


def resumed(world, folder, *settings, **names):
    """Return what a job says that goes on from the first checkpoint of one that was killed."""
    saved = folder / "saved"
    settings += (f"trainer.default_local_dir={saved}", "trainer.save_freq=1")
    job = verl_job.start(world, folder / "first", *settings, **names)
    try:
        verl_job.wait(job, folder / "first", (saved / "latest_checkpointed_iteration.txt").exists, 900)
    finally:
        verl_job.end(job)
    output = trained(world, folder / "second", *settings, **names)
    assert min(metrics(output, "actor/grad_norm")) > 0
    live(folder / "second")
    return output


def check_audited(folder):
    audits = [note for note in verl_job.audits(folder) if "audited" in note]
    assert audits and not any(note["failed"] or note["not_audited"] for note in audits)


def test_the_fully_asynchronous_trainer_goes_on_after_a_kill(wide_world, tmp_path):
    output = resumed(wide_world, tmp_path, *FULLY, entry=ASYNCHRONOUS, FLASHPATCH="cpu,fp8,grpo,fsdp")
    versions = metrics(output, "fully_async/count/current_param_version")
    assert versions[0] >= 1 and versions == sorted(set(versions))
    assert set(metrics(output, "actor/samples")) == {16}
    check_audited(tmp_path / "second")


def test_flowrl_on_fp8_rollouts_goes_on_after_a_kill(wide_world, tmp_path):
    longer = ("trainer.total_training_steps=3", "trainer.total_epochs=3", SLOWLY)
    output = resumed(wide_world, tmp_path, *longer, FLASHPATCH="cpu,fp8,flowrl")
    steps = metrics(output, "training/global_step")
    assert steps[0] > 1 and steps[-1] == 3
    assert min(metrics(output, "actor/tb_loss")) > 0 and len(metrics(output, "actor/log_z")) == len(steps)


def test_the_fully_asynchronous_trainer_trains_flowrl(wide_world, tmp_path):
    output = trained(wide_world, tmp_path, *FULLY, SLOWLY, entry=ASYNCHRONOUS, FLASHPATCH="cpu,fp8,flowrl")
    assert min(metrics(output, "actor/tb_loss")) > 0 and min(metrics(output, "actor/grad_norm")) > 0
    assert max(metrics(output, "training/rollout_probs_diff_mean")) < 0.05
    live(tmp_path)


def test_the_fully_asynchronous_trainer_rolls_out_with_drafts(wide_world, tmp_path):
    on = dict(entry=ASYNCHRONOUS, FLASHPATCH="cpu,bf16,eagle", config="[eagle]\nhistory = true\n")
    output = trained(wide_world, tmp_path, *FULLY, **on)
    notes = eagle_cotraining.notes(tmp_path).values()
    assert max(one["eagle_history"]["drafted"] for one in notes if "eagle_history" in one) > 0
    assert min(metrics(output, "actor/grad_norm")) > 0
    live(tmp_path)


def test_one_step_off_policy_follows_audited_updates(wide_world, tmp_path):
    settings = [one for one in FULLY if not one.startswith(("data.", "rollout.total", "async_training"))]
    output = trained(wide_world, tmp_path, *settings, CONFIG, entry=ONE_STEP, FLASHPATCH="cpu,fp8,grpo,fsdp")
    assert metrics(output, "training/global_step") == [1, 2] and min(metrics(output, "actor/grad_norm")) > 0
    check_audited(tmp_path)
    live(tmp_path)
