"""How long an unmodified verl job takes to its first step on this machine, started with verl's numbers and with cpu's.

    python benchmarks/first_step.py [--runs 1] [--precision bf16] [SETTING...]

A GRPO job of two steps of a two-layer model, `verl.trainer.main_ppo` under `FLASHPATCH=cpu,PRECISION`, in turns:

    as verl starts it   verl's numbers of helper processes and dashboard as settings
    as cpu starts it    the same command with the family's defaults

Printed are the seconds and the processor seconds (user and system, all of the job's processes) until the first
step was reported, and how many processes there had been. Processor seconds tell the same on a busy machine.
Aim: 90 s on two quiet cores."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import quick
import turns

TREE = Path(__file__).resolve().parents[1]
EXAMPLE = TREE / "examples" / "verl_cpu"
AIM = 90.0  # seconds
TICK = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36
STEP = b"training/global_step:1"
HELPERS = (
    "actor_rollout_ref.rollout.agent.num_workers",
    "reward.num_workers",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units",
)
JOB = """
algorithm.adv_estimator=grpo data.train_batch_size=8 data.max_prompt_length=32 data.max_response_length=8
data.dataloader_num_workers=0
actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.enforce_eager=True
actor_rollout_ref.rollout.gpu_memory_utilization=0.1 actor_rollout_ref.rollout.max_model_len=64
actor_rollout_ref.rollout.max_num_seqs=32 actor_rollout_ref.rollout.max_num_batched_tokens=512
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console] trainer.val_before_train=False
trainer.test_freq=-1 trainer.save_freq=-1 trainer.total_training_steps=2 trainer.total_epochs=1
+ray_kwargs.ray_init.object_store_memory=200000000
""".split()


@dataclass
class Usage:
    """What a job had used by some moment: seconds, processor seconds, processes."""

    wall: float
    cpu: float
    processes: int


def environment(folder: Path, precision: str) -> dict[str, str]:
    """Variables of the job; nothing is downloaded or reported, and bytecode is kept, as by default."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FLASHPATCH", "VERL_", "VLLM_")) and name != "PYTHONDONTWRITEBYTECODE"
    }
    return {
        **kept,
        "FLASHPATCH": f"cpu,{precision}",
        "FLASHPATCH_LEDGER": str(folder / "ledger"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def descendants() -> dict[tuple[int, str], float]:
    """Processor seconds of every living descendant, by process id and start time."""
    parents, found = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(name)] = int(fields[1])
        found[int(name)] = (fields[19], (int(fields[11]) + int(fields[12])) / TICK)

    def ours(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return {(pid, start): cpu for pid, (start, cpu) in found.items() if ours(pid)}


def reap() -> None:
    """End what a job left, and forget it: the next job's count begins at zero."""
    for pid, _ in descendants():
        os.kill(pid, signal.SIGKILL)
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def first_step(world: Path, precision: str, settings: list[str]) -> Usage:
    """Run a job to its end; returns its usage when it reported its first step.

    Raises:
        SystemExit: the job failed; the message names its log."""
    folder = Path(tempfile.mkdtemp(prefix="first-step-"))
    files = [
        f"data.{kind}_files={world}/{name}.parquet" for kind, name in (("train", "train"), ("val", "test"))
    ]
    files += [
        f"actor_rollout_ref.model.path={world}/model",
        f"reward.custom_reward_function.path={EXAMPLE}/reward.py",
    ]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *JOB, *files, *settings]
    seen: dict[tuple[int, str], float] = {}
    usage, begin = None, time.monotonic()
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(
            command, env=environment(folder, precision), cwd=folder, stdout=log, stderr=log
        )
    while job.poll() is None:
        seen.update(descendants())
        if usage is None and STEP in (folder / "log").read_bytes():
            usage = Usage(time.monotonic() - begin, sum(seen.values()), len(seen))
        time.sleep(0.2)
    reap()
    if job.returncode or usage is None:
        raise SystemExit(f"the job failed with exit code {job.returncode}; see {folder}/log")
    return usage


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1, help="jobs of each kind (default %(default)s)")
    parser.add_argument("--precision", default="bf16", help="fp8 or bf16, beside cpu (default %(default)s)")
    parser.add_argument("settings", nargs="*", help="settings for both kinds of job")
    given = quick.parse(parser)
    ctypes.CDLL(None).prctl(
        PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # processes whose parent ended stay descendants
    world = Path(tempfile.mkdtemp(prefix="first-step-")) / "world"
    subprocess.run([sys.executable, EXAMPLE / "make.py", world], check=True, capture_output=True)
    helpers = [f"{path}=8" for path in HELPERS]
    kinds = {
        "as verl starts it": [*helpers, "+ray_kwargs.ray_init.include_dashboard=True"],
        "as cpu starts it": [],
    }
    print(turns.cpu())
    seen: dict[str, list[Usage]] = {name: [] for name in kinds}
    for _ in range(given.runs):
        for name, settings in kinds.items():
            usage = first_step(world, given.precision, [*given.settings, *settings])
            seen[name].append(usage)
            print(
                f"{name:19} first step after {usage.wall:6.1f} s, {usage.cpu:6.1f} processor seconds, "
                f"{usage.processes} processes",
                flush=True,
            )
    stock, ours = ([median(u.wall for u in runs), median(u.cpu for u in runs)] for runs in seen.values())
    print(f"ratio: {stock[0] / ours[0]:.1f} in seconds, {stock[1] / ours[1]:.1f} in processor seconds")
    least = min(usage.wall for usage in seen["as cpu starts it"])
    print(f"best {least:.0f} s, aim {AIM:.0f} s: {'met' if least <= AIM else 'missed'}")


if __name__ == "__main__":
    main()
