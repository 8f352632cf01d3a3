"""What training the drafter costs a verl job and gives it.

    python benchmarks/drafter_training.py [--steps 24] [--rounds 1]

Needs verl and vLLM. Jobs of `verl.trainer.main_ppo` under `FLASHPATCH=cpu,bf16,eagle`, the same seeds, two replicas of one thread
each, answers that end by chance after 1 to 400 tokens: in most steps one replica waits for the other. In turns:

    process   eagle's default: a process of its own trains between rollouts
    frozen    drafts with the first drafter of that job, and trains none: what a step takes without training

Printed per job: seconds of all steps, and of their rollouts; the training steps of the drafter; tokens that a verification gave
(acceptance length, 1 is no draft accepted) in the first and in the last quarter. Last: by how much longer than the frozen job's
the steps took, and what was gained for it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import quick
from first_step import EXAMPLE, JOB, environment, processor

CONFIG = """
[eagle]
drafter = "{drafter}"
arms = ["3_1_4"]
cotrain = {cotrain}
train_seconds = 20.0
trainer = ["rate=3e-3", "least=4", "batch=256", "dtype=float32"]
"""
UNEVEN = """
data.train_batch_size=2 actor_rollout_ref.rollout.n=2 data.max_response_length=400
actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 trainer.n_gpus_per_node=2
actor_rollout_ref.rollout.max_model_len=440 actor_rollout_ref.rollout.temperature=0.2
actor_rollout_ref.rollout.agent.num_workers=1 actor_rollout_ref.actor.fsdp_config.dtype=bfloat16
+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=33554432
""".split()
KINDS = ("process", "frozen")


@dataclass
class Found:
    """What one job reported of its steps after the first."""

    steps: float
    rollouts: float
    trained: float
    first: float
    last: float


def run(kind: str, world: Path, steps: int, first: Path | None) -> tuple[Found, Path]:
    """Run a job; return what it reported, and the drafter that it began with.

    Raises:
        SystemExit: the job failed; the message names its log.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"drafter-{kind}-"))
    config = folder / "flashpatch.toml"
    config.write_text(
        CONFIG.format(
            drafter=first if kind == "frozen" else "new",
            cotrain=str(kind != "frozen").lower(),
        )
    )
    settings = [
        *JOB,
        *UNEVEN,
        *(
            f"data.{part}_files={world}/{name}.parquet"
            for part, name in (("train", "train"), ("val", "test"))
        ),
        f"actor_rollout_ref.model.path={world}/model",
        f"reward.custom_reward_function.path={EXAMPLE}/reward.py",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}/saved",
    ]
    log = folder / "log"
    with log.open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "verl.trainer.main_ppo", *settings],
            env=environment(folder, "bf16,eagle") | {"FLASHPATCH_CONFIG": str(config)},
            cwd=folder,
            stdout=file,
            stderr=file,
        )
    text = log.read_text(errors="replace")
    if done.returncode or len(values(text, "training/global_step")) != steps:
        raise SystemExit(f"the job {kind} failed with exit code {done.returncode}; see {log}")
    lengths = values(text, "eagle/acceptance_length") or [float("nan")]  # no trainer counts them
    quarter = max(1, len(lengths) // 4)
    found = Found(
        sum(values(text, "timing_s/step")[1:]),
        sum(values(text, "timing_s/gen")[1:]),
        max(values(text, "eagle/trained_steps"), default=0.0),
        mean(lengths[:quarter]),
        mean(lengths[-quarter:]),
    )
    return found, folder / "saved" / "eagle" / "first"


def values(text: str, name: str) -> list[float]:
    """Return one metric of verl's console logger, step by step."""
    return [float(value) for value in re.findall(rf"\b{re.escape(name)}:(-?[\d.e+-]+)", text)]


def main() -> None:
    """Run the jobs, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=1, help="jobs of each kind (default %(default)s)")
    given = quick.parse(parser, steps=4)
    world = Path(tempfile.mkdtemp(prefix="drafter-")) / "world"
    subprocess.run([sys.executable, EXAMPLE / "make.py", world], check=True, capture_output=True)
    print(f"{processor()}; {given.steps} steps")
    print(
        f"{'':8} {'steps, s':>9} {'rollouts, s':>11} {'trained':>8} {'acceptance, first and last quarter':>35}"
    )
    jobs: dict[str, list[Found]] = {kind: [] for kind in KINDS}
    first = None
    for _ in range(given.rounds):
        for kind in KINDS:
            found, began = run(kind, world, given.steps, first)
            first = first or began
            jobs[kind].append(found)
            print(
                f"{kind:8} {found.steps:9.1f} {found.rollouts:11.1f} {found.trained:8.0f} "
                f"{found.first:28.2f} {found.last:6.2f}",
                flush=True,
            )
    frozen = mean(one.steps for one in jobs["frozen"])
    trained = jobs["process"]
    print(
        f"training: steps took {mean(one.steps for one in trained) / frozen:.2f} of the frozen job's, "
        f"{mean(one.trained for one in trained):.0f} training steps, "
        f"acceptance length {mean(one.last - one.first for one in trained):+.2f}"
    )


if __name__ == "__main__":
    main()
