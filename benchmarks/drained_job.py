"""What a job of verl gains where its drafter is trained from when the first replica has drained, and what that costs.

    python benchmarks/drained_job.py WORLD [--steps 26]

Needs verl and vLLM. One job of `verl.trainer.main_ppo` under `FLASHPATCH=cpu,bf16,eagle`: two replicas of one thread, each
pinned to a core of its own, so that the core of one that has drained idles; answers that end by chance after 1 to 900
tokens. In every other step verl's balancer says that all replicas are busy, so that the drafter is trained in the pause
alone: steps of both kinds meet the same other work of the machine. Printed, of the steps after the trainer's first, for
each kind: the drafter's training steps per step, the seconds of rollouts, from the first request to the last answer, and
these per token of the longest answer. Last: the ratios, `drained` over `pauses`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

import psutil
import quick
from verl.workers.rollout.router import GlobalRequestLoadBalancer

TREE = Path(__file__).resolve().parents[1]
CONFIG = """
[eagle]
drafter = "new"
arms = ["3_1_4"]
trainer = ["rate=3e-3", "least=4", "batch=256", "dtype=float32", "threads=1"]
"""
JOB = """
data.train_batch_size=4 actor_rollout_ref.rollout.n=2 data.max_response_length=900
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=2
actor_rollout_ref.rollout.max_model_len=960 actor_rollout_ref.rollout.temperature=0.2
actor_rollout_ref.actor.optim.lr=1e-6
""".split()
NAMES = ("eagle/trained_steps", "response_length/max")


class EveryOther(GlobalRequestLoadBalancer):
    """Say in every other rollout that all servers are busy, and write down how long each took."""

    def __init__(self, servers, config):
        super().__init__(servers)
        self._file, self._rollouts, self._began, self._first = Path(config["file"]), 0, 0.0, 0.0

    def acquire_server(self, request_id):
        if not self.get_total_inflight():
            self._rollouts, self._began, self._first = self._rollouts + 1, time.monotonic(), 0.0
        return super().acquire_server(request_id)

    def release_server(self, server_id, request_id=None):
        super().release_server(server_id, request_id)
        seconds = time.monotonic() - self._began
        if not self.get_inflight_count(server_id):
            self._first = self._first or seconds
        if not self.get_total_inflight():
            with self._file.open("a") as file:
                file.write(f"{self._first} {seconds}\n")

    def get_status(self):
        found = super().get_status()
        if self._rollouts % 2:
            found["servers"] = dict.fromkeys(found["servers"], 1)
        return found


def pin(job: int) -> bool:
    """Give each replica's engine processes a core of their own; return whether both replicas are there."""
    engines = [one for one in psutil.Process(job).children(recursive=True) if "EngineCore" in one.name()]
    for core, engine in enumerate(sorted(engines, key=lambda one: one.pid)):
        for process in (engine, *engine.children(recursive=True)):
            subprocess.run(["taskset", "-acp", str(core), str(process.pid)], check=True, capture_output=True)
    return len(engines) == 2


def run(world: Path, steps: int) -> list[tuple[float, ...]]:
    """Run the job; return of each step what `NAMES` say, and the seconds until the first replica had drained, and the last."""
    sys.path.insert(0, str(TREE / "tests" / "support"))
    import verl_job

    folder = Path(tempfile.mkdtemp(prefix="drained-"))
    (folder / "router.yaml").write_text(f"router_class: drained_job.EveryOther\nfile: {folder}/rollouts\n")
    (folder / "flashpatch.toml").write_text(CONFIG)
    more = (
        *JOB,
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}/saved",
        f"actor_rollout_ref.rollout.router_config_path={folder}/router.yaml",
    )
    variables = {"FLASHPATCH": "cpu,bf16,eagle", "FLASHPATCH_CONFIG": str(folder / "flashpatch.toml")}
    job = verl_job.start(world, folder, *more, PYTHONPATH=os.fspath(Path(__file__).parent), **variables)
    try:
        while job.poll() is None and not pin(job.pid):
            time.sleep(5)
        if job.wait():
            raise SystemExit(f"the job failed; see {folder}/job.log")
    finally:
        verl_job.end(job)
    columns = [
        [float(found) for found in re.findall(rf"\b{name}:(-?[\d.e+-]+)", verl_job.said(folder))]
        for name in NAMES
    ]
    rollouts = [map(float, line.split()) for line in (folder / "rollouts").read_text().splitlines()]
    return list(zip(*columns, *zip(*rollouts, strict=True), strict=True))


def main() -> None:
    """Run the job, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("world", type=Path, help="folder that examples/verl_cpu/make.py wrote")
    parser.add_argument("--steps", type=int, default=26)
    given = quick.parse(parser, steps=6)
    rows = run(given.world, given.steps)
    kinds: dict[str, list[tuple[float, float, float]]] = {"pauses": [], "drained": []}
    for number, (before, now) in enumerate(zip(rows, rows[1:], strict=False), 2):
        if before[0]:
            kind = "pauses" if number % 2 else "drained"
            kinds[kind].append((now[0] - before[0], now[3], now[3] / now[1]))
            print(number, kind, *(f"{one:.4g}" for one in now), flush=True)
    means = {kind: [fmean(column) for column in zip(*found, strict=True)] for kind, found in kinds.items()}
    for kind, found in kinds.items():
        trained, seconds, _ = means[kind]
        token = median(one[2] for one in found)
        print(f"{kind:8} {len(found):3} {trained:8.1f} {seconds:8.2f} s {1000 * token:8.2f} ms")
    ratios = [one / other for one, other in zip(means["drained"], means["pauses"], strict=True)]
    print("training steps {:.2f}, seconds {:.2f}, per token {:.2f}".format(*ratios))


if __name__ == "__main__":
    main()
