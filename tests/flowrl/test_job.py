"""Two FlowRL steps of unmodified verl with real rollouts, and what the rollout says to a head that leaks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import flow_lab
import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 1500  # seconds; two idle cores need 100 to 200

COMMAND = """
algorithm.adv_estimator=grpo
data.train_batch_size=8 data.max_prompt_length=32 data.max_response_length=8 data.dataloader_num_workers=0
actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.ppo_mini_batch_size=8
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
reward.num_workers=1 transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console] trainer.val_before_train=False
trainer.test_freq=-1 trainer.save_freq=-1 trainer.total_training_steps=2 trainer.total_epochs=1
+ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=200000000
""".split()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, data and a model of random weights."""
    folder = tmp_path_factory.mktemp("world")
    make = [sys.executable, ROOT / "examples" / "verl_cpu" / "make.py", folder]
    subprocess.run(make, env=flow_lab.environment(folder), check=True)
    return folder


def start(world: Path, folder: Path, *extra: str, **variables: str) -> subprocess.Popen[bytes]:
    """verl's own entry point, its output in ``job.log``, in a process group of its own."""
    where = (
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/test.parquet",
        f"actor_rollout_ref.model.path={world}/model",
        f"reward.custom_reward_function.path={ROOT / 'tests' / 'cpu' / 'cpu_reward.py'}",
    )
    settings = {"FLASHPATCH": "cpu,bf16,flowrl", "VLLM_CPU_KVCACHE_SPACE": "1", **variables}
    with (folder / "job.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *COMMAND, *where, *extra],
            env=flow_lab.environment(folder, **settings),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def end(job: subprocess.Popen[bytes]) -> None:
    """End the job and its descendants, those of its Ray too."""
    import psutil

    children = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def metrics(output: str, name: str) -> list[float]:
    """One metric, step by step."""
    return [float(value) for value in re.findall(rf"\b{re.escape(name)}:(-?[\d.e+-]+)", output)]


@pytest.mark.full  # over 100 s where nothing else runs
def test_two_steps_with_updated_rollouts(world, tmp_path):
    job = start(world, tmp_path)
    try:
        code = job.wait(LIMIT)
    finally:
        end(job)
    said = (tmp_path / "job.log").read_text(errors="replace")
    assert code == 0, said[-8000:]
    assert metrics(said, "training/global_step") == [1, 2]
    assert max(metrics(said, "training/rollout_probs_diff_max")) < 0.01
    for name in ("logpf", "logp_ref", "log_z", "log_reward", "tb_loss", "tb_residual_mean"):
        assert len(metrics(said, f"actor/{name}")) == 2, name
    assert min(metrics(said, "actor/grad_norm")) > 0 and min(metrics(said, "actor/tb_loss")) > 0
    assert "policy_loss.loss_mode=flowrl, as FlowRL needs" in said

    live = subprocess.run(
        [Path(sys.executable).with_name("flashpatch-verify"), "--live", "--json"],
        env=flow_lab.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert live.returncode == 0, live.stdout + live.stderr
    processes = json.loads(live.stdout)["processes"]
    (trainer,) = [process for process in processes if "trainer" in process["roles"]]
    calls = {name: patch["calls"] for name, patch in trainer["patches"].items()}
    assert calls["flowrl.verl.loss"] == calls["flowrl.verl.loss-mode"] == 4  # two micro-batches in each step
    assert calls["flowrl.verl.export"] == 3  # before the first step and after each
    assert calls["flowrl.verl.head"] == 2  # the actor's and the reference's, which gets none
    drivers = [process for process in processes if "driver" in process["roles"]]
    assert any(process["patches"].get("flowrl.verl.recipe", {}).get("calls") for process in drivers)


@pytest.mark.full
def test_a_head_that_leaks_is_refused_by_the_rollout(world, tmp_path):
    """The filter taken out of our export: vLLM knows no proj_z. The trainer would then wait for ever."""
    (tmp_path / "sitecustomize.py").write_text(
        "from flashpatch.patches.flowrl import export\nexport.without_head = lambda pairs: pairs\n"
    )
    job = start(world, tmp_path, PYTHONPATH=str(tmp_path))
    deadline, said = time.monotonic() + LIMIT, ""
    try:
        while (
            time.monotonic() < deadline and job.poll() is None and "no module or parameter named" not in said
        ):
            time.sleep(2)
            said = (tmp_path / "job.log").read_text(errors="replace")
    finally:
        end(job)
    said = (tmp_path / "job.log").read_text(errors="replace")
    assert "proj_z" in said and not metrics(said, "training/global_step"), said[-6000:]
