"""What jobs of verl that train a drafter between rollouts have in common, whichever engine they roll out with."""

import json
from pathlib import Path
from typing import Any

from drafter_lab import publish
from safetensors.torch import load_file
from transformers import AutoConfig
from verl_job import metrics, trained

STEPS = 14  # the trainer has the pauses between rollouts alone, of a second each
SETTINGS = (
    "data.max_response_length=40",
    "actor_rollout_ref.rollout.max_model_len=96",
    "actor_rollout_ref.rollout.temperature=0.05",  # a random model's answers are not all alike otherwise
    "actor_rollout_ref.actor.optim.lr=1e-4",
    f"trainer.total_training_steps={STEPS}",
)
CONFIG = """
[eagle]
drafter = "{drafter}"
train_seconds = 20.0
trainer = ["rate=3e-3", "least=4", "batch=256", "dtype=float32"{trainer}]
{options}
"""


def job(world: Path, folder: Path, *extra: str, on: dict[str, str] | None = None, **options: str) -> str:
    """Run a job to its good end, with these options in CONFIG and variables; return its output."""
    folder.mkdir(exist_ok=True)
    where = (f"trainer.default_local_dir={folder}/saved", f"hydra.run.dir={folder}/hydra")
    config = CONFIG.format(**{"drafter": "new", "options": "", "trainer": "", **options})
    on = dict(FLASHPATCH="cpu,bf16,eagle", config=config, **(on or {}))
    return trained(world, folder, *SETTINGS, *where, *extra, **on)


def notes(folder: Path) -> dict[int, dict[str, Any]]:
    """What each process wrote into its ledger row, by pid."""
    rows = [json.loads(path.read_text()) for path in (folder / "ledger").rglob("*.json")]
    return {row["pid"]: row["notes"] for row in rows if row.get("kind") == "row"}


def check_published(world: Path, folder: Path, *extra: str, **more: Any) -> None:
    """A published EAGLE-3 drafter of 200 of the target's 261 tokens, those of answers among them, is trained and keeps them."""
    own = publish(folder / "own", AutoConfig.from_pretrained(world / "model"), 200)
    said = job(world, folder, *extra, drafter=str(own), trainer=', "ttt_steps=2"', **more)
    check_acceptance_rises(said)
    newest = max((folder / "saved" / "eagle").rglob("drafter-*"))
    first, last = (load_file(at / "model.safetensors") for at in (own, newest))
    assert first.keys() == last.keys()
    assert {name for name in first if first[name].equal(last[name])} == {"d2t", "t2d"}


def check_job(output: str, found: dict[int, dict[str, Any]], worker: int, engine: int) -> None:
    """Acceptance rises; who captured, verl's actor, who drafts, who trained and who brought drafters over has a row of its own."""
    assert metrics(output, "training/global_step") == list(range(1, STEPS + 1))
    check_acceptance_rises(output)
    assert max(metrics(output, "training/rollout_probs_diff_max")) < 0.1  # at this temperature
    captured = {pid: noted["eagle_capture"] for pid, noted in found.items() if "eagle_capture" in noted}
    [actor] = (pid for pid in captured if captured[pid].get("requests"))
    assert found[engine]["eagle_drafter"]["version"] >= 2
    [trainer] = [pid for pid, noted in found.items() if "eagle_training" in noted]
    [driving] = [pid for pid, noted in found.items() if "eagle_trainer" in noted]
    assert len({actor, worker, engine, trainer, driving}) == len({worker, engine}) + 3
    assert found[trainer]["eagle_training"]["step"] > 0


def check_acceptance_rises(output: str) -> None:
    """A drafter that began as noise was replaced twice at least, and more of its drafts are accepted."""
    lengths = metrics(output, "eagle/acceptance_length")
    assert lengths[0] < 1.3 and sum(lengths[-3:]) / 3 > lengths[0] + 0.15, lengths
    assert metrics(output, "eagle/drafter_version")[-1] >= 2
