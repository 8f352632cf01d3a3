"""What a job of verl gains where its drafter is trained from when the first replica has drained, and what that costs.

    python benchmarks/drained_job.py WORLD [--steps 30]

Needs verl and vLLM. A job of `tests/support/eagle_cotraining.py`: two replicas of one thread, each pinned to a core of its
own, so that the core of one that has drained idles; answers that end by chance after 1 to 900 tokens. In every other step verl's balancer says that all replicas are busy, so that the drafter is trained in the pause
alone: steps of both kinds meet the same other work of the machine. Printed, of the steps after the trainer's first, for
each kind: the drafter's training steps per step, the seconds of rollouts, from the first request to the last answer, and
these per token of the longest answer. Last: the ratios, `drained` over `pauses`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import fmean

import psutil
import quick
from verl.workers.rollout.router import GlobalRequestLoadBalancer

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
JOB = """
data.train_batch_size=4 actor_rollout_ref.rollout.n=2 data.max_response_length=900
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=2
actor_rollout_ref.rollout.max_model_len=960 actor_rollout_ref.rollout.temperature=0.2
actor_rollout_ref.actor.optim.lr=1e-6
""".split()


class EveryOther(GlobalRequestLoadBalancer):
    """Say in every other rollout that all servers are busy, and write down how long each took."""

    def __init__(self, servers, config):
        super().__init__(servers)
        self._file, self._rollouts, self._began = Path(config["file"]), 0, 0.0

    def acquire_server(self, request_id):
        if not self.get_total_inflight():
            self._rollouts, self._began = self._rollouts + 1, time.monotonic()
        return super().acquire_server(request_id)

    def release_server(self, server_id, request_id=None):
        super().release_server(server_id, request_id)
        if not self.get_total_inflight():
            with self._file.open("a") as file:
                file.write(f"{time.monotonic() - self._began}\n")

    def get_status(self):
        found = super().get_status()
        if self._rollouts % 2:
            found["servers"] = dict.fromkeys(found["servers"], 1)
        return found


def pin() -> None:
    """Give each replica's engine processes a core of their own, once both replicas are there."""
    engines: list[psutil.Process] = []
    while len(engines) < 2:
        time.sleep(5)
        engines = [one for one in psutil.Process().children(recursive=True) if "EngineCore" in one.name()]
        for core, engine in enumerate(sorted(engines, key=lambda one: one.pid)):
            for process in (engine, *engine.children(recursive=True)):
                subprocess.run(
                    ["taskset", "-acp", str(core), str(process.pid)], check=True, capture_output=True
                )


def run(world: Path, steps: int) -> list[tuple[float, ...]]:
    """Run the job; return of each step the training steps so far, the longest answer's tokens, and the rollouts' seconds."""
    sys.path.insert(0, str(SUPPORT))
    import eagle_cotraining
    import verl_job

    folder = Path(tempfile.mkdtemp(prefix="drained-"))
    (folder / "router.yaml").write_text(f"router_class: drained_job.EveryOther\nfile: {folder}/rollouts\n")
    router = f"actor_rollout_ref.rollout.router_config_path={folder}/router.yaml"
    how = dict(trainer=', "threads=1"', on={"PYTHONPATH": str(Path(__file__).parent)})
    threading.Thread(target=pin, daemon=True).start()
    said = eagle_cotraining.job(world, folder, *JOB, router, f"trainer.total_training_steps={steps}", **how)
    columns = [verl_job.metrics(said, name) for name in ("eagle/trained_steps", "response_length/max")]
    return list(zip(*columns, map(float, (folder / "rollouts").read_text().split()), strict=True))


def main() -> None:
    """Run the job, and print a table."""
    parser = quick.parser(__doc__)
    parser.add_argument("world", type=Path, help="folder that examples/verl_cpu/make.py wrote")
    parser.add_argument("--steps", type=int, default=30)
    given = quick.parse(parser, steps=8)
    rows = run(given.world, given.steps)
    kinds: dict[str, list[tuple[float, float, float]]] = {"pauses": [], "drained": []}
    for number, (before, now) in enumerate(zip(rows, rows[1:], strict=False), 2):
        if before[0]:
            trained, tokens, seconds = now
            kind = "pauses" if number % 2 else "drained"
            kinds[kind].append((trained - before[0], seconds, 1000 * seconds / tokens))
    means = {kind: [fmean(column) for column in zip(*found, strict=True)] for kind, found in kinds.items()}
    for kind, (trained, seconds, token) in means.items():
        print(f"{kind:8} {len(kinds[kind]):3} {trained:8.1f} {seconds:8.2f} s {token:8.2f} ms")
    ratios = [one / other for one, other in zip(means["drained"], means["pauses"], strict=True)]
    print("training steps {:.2f}, seconds {:.2f}, per token {:.2f}".format(*ratios))


if __name__ == "__main__":
    main()
