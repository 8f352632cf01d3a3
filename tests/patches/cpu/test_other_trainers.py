"""Whole jobs of verl's trainers besides ``main_ppo``, and one of ``main_ppo``; some are killed and go on."""

import eagle_cotraining
import pytest
import verl_job
from verl_job import FULLY, live, metrics

pytestmark = [pytest.mark.verl, pytest.mark.full]

PPO = "verl.trainer.main_ppo"
ASYNCHRONOUS = "verl.experimental.fully_async_policy.fully_async_main"
ONE_STEP = "verl.experimental.one_step_off_policy.main_ppo"
SLOWLY, HISTORY = "actor_rollout_ref.actor.optim.lr=1e-3", "[eagle]\nhistory = true\n"
OFF = [one for one in FULLY if not one.startswith(("data.", "rollout.total", "async_training"))]
OFF += ["hydra.searchpath=[pkg://verl.trainer.config]"]  # verl's is a path within its repository
LONGER = ["trainer.total_training_steps=3", "trainer.total_epochs=3", SLOWLY]
VERSION, STEP = "fully_async/count/current_param_version", "training/global_step"
JOBS = [
    (ASYNCHRONOUS, "cpu,fp8,grpo,fsdp", [*FULLY], VERSION, True),
    (ASYNCHRONOUS, "cpu,fp8,flowrl", [*FULLY, SLOWLY], VERSION, False),
    (ASYNCHRONOUS, "cpu,bf16,eagle", [*FULLY], VERSION, False),
    (ONE_STEP, "cpu,fp8,grpo,fsdp", OFF, STEP, False),
    (PPO, "cpu,fp8,flowrl", LONGER, STEP, True),
]


@pytest.mark.parametrize(
    "entry, names, settings, count, killed", JOBS, ids=[" ".join(job[:2]) for job in JOBS]
)
def test_a_job_trains_and_is_proven(wide_world, tmp_path, entry, names, settings, count, killed):
    saved, first, folder = tmp_path / "saved", tmp_path / "first", tmp_path / "second"
    settings += [f"trainer.default_local_dir={saved}", "trainer.save_freq=1"] if killed else []
    how = dict(entry=entry, FLASHPATCH=names, config=HISTORY if "eagle" in names else "")
    if killed:
        job = verl_job.start(wide_world, first, *settings, **how)
        try:
            verl_job.wait(job, first, (saved / "latest_checkpointed_iteration.txt").exists, 900)
        finally:
            verl_job.end(job)
    output = verl_job.trained(wide_world, folder, *settings, **how)
    counted = metrics(output, count)
    assert counted == sorted({*counted}) and counted[0] >= killed * (1 + (count == STEP))
    assert min(metrics(output, "actor/grad_norm")) > 0
    if "flowrl" in names:
        assert min(metrics(output, "actor/tb_loss")) > 0 and metrics(output, "actor/log_z")
    if "grpo" in names:
        assert set(metrics(output, "actor/samples")) == {16}
        audits = [note for note in verl_job.audits(folder) if "audited" in note]
        assert audits and not any(note["failed"] or note["not_audited"] for note in audits)
    if "eagle" in names:
        notes = eagle_cotraining.notes(folder).values()
        assert max(one["eagle_history"]["drafted"] for one in notes if "eagle_history" in one) > 0
    live(folder)
