"""What the tokens that `support` carries cost a step of verl on this machine, beside the same job without them.

    python benchmarks/support.py [--runs 2] [--width 40] [SETTING...]

A GRPO job of a two-layer model with top_k and top_p, `verl.trainer.main_ppo` under `FLASHPATCH=cpu,bf16`, in turns without and with
the option. Printed are, per step after the first, the seconds of the step and of its parts by verl's own clock, and the
processor seconds of all of the job's processes: the median of all steps and jobs. verl looks every two seconds whether rollouts
have ended, so `step` and `gen` of short steps go in twos; processor seconds do not.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import first_step
import quick

STEPS = 6
PARTS = ("step", "gen", "old_log_prob", "update_actor")
TRUNCATED = """
actor_rollout_ref.rollout.top_p=0.8 actor_rollout_ref.rollout.top_k=20 algorithm.rollout_correction.rollout_is=token
""".split()


def run(world: Path, width: int, settings: list[str]) -> Iterator[tuple[float, ...]]:
    """Run a job to its end; yields of each step but the first the seconds of `PARTS` and the processor seconds.

    Raises:
        SystemExit: the job failed; the message names its log.
    """
    folder = Path(tempfile.mkdtemp(prefix="support-"))
    config = folder / "flashpatch.toml"
    config.write_text(f"[fp8]\nsupport = {width}\n")
    files = [
        f"data.{kind}_files={world}/{name}.parquet" for kind, name in (("train", "train"), ("val", "test"))
    ]
    files += [
        f"actor_rollout_ref.model.path={world}/model",
        f"reward.custom_reward_function.path={first_step.EXAMPLE}/reward.py",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.total_epochs={STEPS}",
    ]
    variables = first_step.environment(folder, "bf16") | {"FLASHPATCH_CONFIG": str(config)}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *first_step.JOB, *TRUNCATED, *files, *settings]
    seen: dict[tuple[int, str], float] = {}
    used: list[float] = []
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(command, env=variables, cwd=folder, stdout=log, stderr=log)
    while job.poll() is None:
        seen.update(first_step.descendants())
        if (folder / "log").read_text(errors="replace").count("training/global_step:") > len(used):
            used.append(sum(seen.values()))
        time.sleep(0.1)
    first_step.reap()
    said = (folder / "log").read_text(errors="replace")
    if job.returncode or len(used) < STEPS:
        raise SystemExit(f"the job failed with exit code {job.returncode}; see {folder}/log")
    timed = [re.findall(rf"timing_s/{part}:([\d.]+)", said) for part in PARTS]
    for step in range(1, STEPS):
        yield (*(float(times[step]) for times in timed), used[step] - used[step - 1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2, help="jobs of each kind (default %(default)s)")
    parser.add_argument("--width", type=int, default=40, help="the option's value (default %(default)s)")
    parser.add_argument("settings", nargs="*", help="settings for both kinds of job")
    given = quick.parse(parser, runs=1)
    ctypes.CDLL(None).prctl(first_step.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    world = Path(tempfile.mkdtemp(prefix="support-")) / "world"
    subprocess.run([sys.executable, first_step.EXAMPLE / "make.py", world], check=True, capture_output=True)
    print(first_step.processor())
    found: dict[int, list[tuple[float, ...]]] = {0: [], given.width: []}
    for _ in range(given.runs):
        for width, steps in found.items():
            steps += run(world, width, given.settings)
    print("support".ljust(9), *(f"{name:>13}" for name in (*PARTS, "processor")))
    for width, steps in found.items():
        print(f"{width:<9}", *(f"{median(column):13.2f}" for column in zip(*steps, strict=True)))


if __name__ == "__main__":
    main()
