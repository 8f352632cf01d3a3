"""What jobs of verl that train a drafter between rollouts have in common, whichever engine they roll out with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from verl_job import metrics

STEPS = 14  # the trainer has the pauses between rollouts alone, of a second each
UNEVEN_STEPS = 16
# Answers end by chance after 1 to 400 tokens, so one replica of two waits for the other in most steps.
UNEVEN = f"""
data.train_batch_size=2 actor_rollout_ref.rollout.n=2 data.max_response_length=400
actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 trainer.n_gpus_per_node=2
actor_rollout_ref.rollout.max_model_len=440 actor_rollout_ref.rollout.temperature=1.0
trainer.total_training_steps={UNEVEN_STEPS}
""".split()
ON_WORKERS = ', "on=workers", "rest={rest}"'  # of the option trainer


def notes(folder: Path) -> dict[int, dict[str, Any]]:
    """What each process wrote into its ledger row, by pid."""
    rows = [json.loads(path.read_text()) for path in (folder / "ledger").rglob("*.json")]
    return {row["pid"]: row["notes"] for row in rows if row.get("kind") == "row"}


def check_acceptance_rises(output: str) -> None:
    """A drafter that began as noise was replaced twice at least, and more of its drafts are accepted."""
    lengths = metrics(output, "eagle/acceptance_length")
    assert lengths[0] < 1.3 and sum(lengths[-3:]) / 3 > lengths[0] + 0.15, lengths
    assert metrics(output, "eagle/drafter_version")[-1] >= 2


def check_trained_on_workers(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    """A job went through, in which verl's workers trained the drafter, in the tail of some steps at least."""
    assert done.returncode == 0, done.stdout[-8000:]
    assert metrics(done.stdout, "training/global_step") == list(range(1, UNEVEN_STEPS + 1))
    assert sum(metrics(done.stdout, "eagle/tail_seconds")) > 0, "no replica ever waited for the other"
    assert metrics(done.stdout, "eagle/trained_steps")[-1] > 10
    assert metrics(done.stdout, "eagle/drafter_version")[-1] >= 2
    found = notes(folder).values()
    assert 1 <= len([noted for noted in found if "eagle_training" in noted]) <= 2, "those that led a slice"
    assert len([noted for noted in found if isinstance(noted.get("eagle_capture"), dict)]) == 2


def first_architectures(folder: Path) -> list[str]:
    """The model classes of the drafter that the job made."""
    return json.loads((folder / "saved" / "eagle" / "first" / "config.json").read_text())["architectures"]
