"""Whole jobs of verl's own entry point, for every family's tests: the command, a tiny world, what a job said.

Two cores need 150 to 250 seconds for a job of two steps on one rank."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import ray_start
import run_events
import warm
from cpu_lab import environment, tail
from machine import limit
from tree import SUPPORT

EXAMPLE = Path(__file__).parents[2] / "examples" / "verl_cpu"
LIMIT = limit(1500)  # seconds

COMMAND = """
algorithm.adv_estimator=grpo
data.train_batch_size=8 data.max_prompt_length=32 data.max_response_length=8 data.dataloader_num_workers=0
actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
actor_rollout_ref.actor.optim.lr=1e-2 actor_rollout_ref.actor.ppo_mini_batch_size=8
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.actor.fsdp_config.dtype=bfloat16
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.1
actor_rollout_ref.rollout.enforce_eager=True actor_rollout_ref.rollout.max_model_len=64
actor_rollout_ref.rollout.max_num_seqs=32 actor_rollout_ref.rollout.max_num_batched_tokens=512
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 actor_rollout_ref.rollout.agent.num_workers=1
actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1
+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=33554432
reward.num_workers=1 transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console] trainer.val_before_train=False
trainer.test_freq=-1 trainer.save_freq=-1 trainer.total_training_steps=2 trainer.total_epochs=1
+ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=200000000
""".split()

#: One FSDP2 rank, which trains twice between two updates, and a replica that draws with the newest weights.
SEPARATE = """
trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False
trainer.v1.separate_async.parameter_sync_step=2 actor_rollout_ref.actor.ppo_mini_batch_size=4
trainer.v1.separate_async.num_warmup_batches=0
actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=1
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2
""".split()

#: verl's fully asynchronous trainer, with rollouts that an update cuts, at most half a batch old.
FULLY = """
data.train_batch_size=0 data.gen_batch_size=1 actor_rollout_ref.hybrid_engine=False rollout.total_rollout_steps=24
rollout.nnodes=1 rollout.n_gpus_per_node=1 actor_rollout_ref.rollout.checkpoint_engine.backend=gloo
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2
algorithm.rollout_correction.bypass_mode=False actor_rollout_ref.rollout.ignore_eos=True data.max_response_length=200
actor_rollout_ref.rollout.max_model_len=256 async_training.partial_rollout=True async_training.staleness_threshold=0.5
async_training.trigger_parameter_sync_step=2 trainer.save_freq=1
""".split()

#: Training that streams, beside rollouts on a GPU of their own.
STREAM = """
trainer.v1.trainer_mode=stream_async
actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=1
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=200
""".split()


def make_world(folder: Path, *settings: str) -> Path:
    """Tokenizer, data and a tiny random model in ``folder``."""
    arguments = [EXAMPLE / "make.py", folder, *settings]
    done = warm.run(warm.VERL, arguments, env=environment(folder), cwd=EXAMPLE, timeout=limit(200))
    assert done.returncode == 0, tail(done)
    return folder


def start(
    world: Path,
    folder: Path,
    *extra: str,
    entry: str = "verl.trainer.main_ppo",
    group: int | None = None,
    **variables: str,
) -> subprocess.Popen[bytes]:
    """verl's own entry point; later settings win. Output in ``job.log``, in this process group, or a session of its own."""
    where = (
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/test.parquet",
        f"actor_rollout_ref.model.path={world}/model",
        f"reward.custom_reward_function.path={Path(__file__).with_name('cpu_reward.py')}",
    )
    folder.mkdir(exist_ok=True)
    with (folder / "job.log").open("wb") as log:
        job = subprocess.Popen(
            [sys.executable, "-m", entry, *COMMAND, *where, *extra],
            env=environment(folder, HYDRA_FULL_ERROR="1", **variables),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=group is None,
            process_group=group,
        )
    ray_start.go_first(job.pid, folder / "job.log")
    return job


def end(job: subprocess.Popen[bytes]) -> None:
    """End the job and its descendants, those of its Ray too."""
    import psutil

    children = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    job.kill()
    with contextlib.suppress(ProcessLookupError):  # of none, if it is in this process's
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def said(folder: Path) -> str:
    """What the job in ``folder`` has said so far."""
    return (folder / "job.log").read_text(errors="replace")


def wait(
    job: subprocess.Popen[bytes], folder: Path, condition: Callable[[], Any], seconds: float = 300
) -> Any:
    """Wait for something to hold, while the job runs, and return it."""
    deadline = time.monotonic() + limit(seconds)
    while not (found := condition()):
        assert job.poll() is None and time.monotonic() < deadline, said(folder)[-8000:]
        time.sleep(0.2)
    return found


def processes(job: subprocess.Popen[bytes], name: str) -> list[Any]:
    """The job's processes that have this name."""
    import psutil

    found = []
    for one in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if name in " ".join(one.cmdline()):
                found.append(one)
    return found


def train(world: Path, folder: Path, *extra: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    """Run a job to its end, whatever that is; again where Ray's own node did not come up."""
    for _ in range(ray_start.TIMES):
        job = start(world, folder, *extra, **variables)
        try:
            code = job.wait(LIMIT)
        finally:
            end(job)
        if code == 0 or ray_start.SAID not in said(folder):
            break
        shutil.rmtree(folder / "ledger", ignore_errors=True)
    return subprocess.CompletedProcess(job.args, code, said(folder))


def trained(world: Path, folder: Path, *extra: str, **variables: str) -> str:
    """Run a job that must end well; return its output."""
    done = train(world, folder, *extra, **variables)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def metrics(output: str, name: str) -> list[float]:
    """One metric, step by step."""
    return [float(value) for value in re.findall(rf"\b{re.escape(name)}:(?:np\.\w+\()?(-?[\d.e+-]+)", output)]


def live(folder: Path) -> list[dict[str, Any]]:
    """The job's processes as ``flashpatch-verify --live`` saw them; every required patch must be live."""
    command = [Path(sys.executable).with_name("flashpatch-verify"), "--live", "--json"]
    done = machine.run(command, 60, env=environment(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["processes"]


def check_learned(output: str, bound: float) -> None:
    """Two steps were taken, both of which taught something, on rollouts whose probabilities are within ``bound`` of the trainer's."""
    assert metrics(output, "training/global_step") == [1, 2]
    assert max(metrics(output, "training/rollout_probs_diff_max")) < bound
    assert min(metrics(output, "actor/grad_norm")) > 0


def check_steps(output: str, bound: float, corrected: bool) -> None:
    """Two steps of rollouts that follow the updates within ``bound``, and are corrected for, by verl, if they are in 8 bits."""
    assert metrics(output, "training/global_step") == [1, 2]
    assert max(metrics(output, "training/rollout_probs_diff_max")) < bound
    advantages, norms = (metrics(output, name) for name in ("critic/advantages/max", "actor/grad_norm"))
    assert len(norms) == 2  # answers to a prompt may all be worth the same, and teach nothing
    assert [norm > 0 for norm in norms] == [most > 0 for most in advantages]
    assert bool(metrics(output, "rollout_corr/rollout_is_mean")) is corrected
    gaps = metrics(output, "mismatch/k3")
    assert len(gaps) == 2 and all(0 <= gap < bound for gap in gaps)


def check_faults(world: Path, folder: Path, fault: str, words: tuple[str, ...], *extra: str) -> str:
    """A rollout worker fails or dies in an update: the job ends, and says these words; return all that it says."""
    faulty = "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=transfer_fault.Faulty"
    env = dict(FLASHPATCH="cpu,bf16", TRANSFER_FAULT=fault, PYTHONPATH=str(SUPPORT))
    done = train(world, folder, *extra, faulty, **env)
    assert done.returncode not in (0, None)
    for word in words:
        assert word in done.stdout, done.stdout[-8000:]
    return done.stdout


def of_role(processes: list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [process for process in processes if role in process["roles"]]


def calls(processes: list[dict[str, Any]], patch: str) -> int:
    """How often a job's processes called a patch."""
    return sum(one["patches"].get(patch, {}).get("calls", 0) for one in processes)


def adapters_of(folder: Path) -> list[dict[str, Any]]:
    """The adapters that the job's engine committed, in order."""
    (run,) = (one for one in (folder / "ledger").iterdir() if one.is_dir())
    processes, _ = run_events.read(run)
    found = [event for process in processes for event in process.events]
    return [event for event in found if event.get("role") == "lora" and event["outcome"] == "committed"]


def audits(folder: Path) -> list[dict[str, Any]]:
    """What each process noted about its last sync."""
    rows = [json.loads(path.read_text()) for path in (folder / "ledger").glob("*/row*.json")]
    return [row["notes"]["audit"] for row in rows if "audit" in row.get("notes", {})]
