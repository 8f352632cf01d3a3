"""Unmodified verl trains with this loss and router, and learns as stock GRPO does where both should agree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import grpo_lab
import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
LIMIT = 1500  # seconds; two cores need 150 to 300

COMMAND = """
algorithm.adv_estimator=grpo
data.train_batch_size=8 data.max_prompt_length=32 data.max_response_length=8 data.dataloader_num_workers=0
data.seed=1
actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.enable_gradient_checkpointing=False
actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.ppo_mini_batch_size=8
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16
actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.1
actor_rollout_ref.rollout.enforce_eager=True actor_rollout_ref.rollout.max_model_len=64
actor_rollout_ref.rollout.max_num_seqs=32 actor_rollout_ref.rollout.max_num_batched_tokens=512
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 actor_rollout_ref.rollout.agent.num_workers=1
reward.num_workers=1 transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.logger=[console] trainer.val_before_train=False
trainer.test_freq=-1 trainer.save_freq=-1 trainer.total_epochs=1
+ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=200000000
""".split()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, data and a tiny random model."""
    folder = tmp_path_factory.mktemp("world")
    command = [sys.executable, ROOT / "examples" / "verl_cpu" / "make.py", folder]
    subprocess.run(command, env=grpo_lab.environment(folder), check=True)
    return folder


def train(world: Path, folder: Path, names: str, *extra: str) -> str:
    """Run verl's own entry point; what it said."""
    where = (
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/test.parquet",
        f"actor_rollout_ref.model.path={world}/model",
        f"reward.custom_reward_function.path={Path(__file__).with_name('grpo_reward.py')}",
    )
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *COMMAND, *where, *extra],
        env=grpo_lab.environment(folder, VLLM_CPU_KVCACHE_SPACE="1", HYDRA_FULL_ERROR="1", FLASHPATCH=names),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def metrics(output: str, name: str) -> list[float]:
    """One metric, step by step."""
    return [float(value) for value in re.findall(rf"\b{re.escape(name)}:(-?[\d.e+-]+)", output)]


def test_two_steps_with_this_loss_and_router(world, tmp_path):
    said = train(world, tmp_path, "cpu,bf16,grpo", "trainer.total_training_steps=2")
    assert metrics(said, "training/global_step") == [1, 2]
    assert metrics(said, "actor/samples") == [32, 32] and min(metrics(said, "actor/grad_norm")) > 0
    assert "policy_loss.loss_mode=grpo_exact" in said and "streaming batcher stands aside" in said
    live = subprocess.run(
        [Path(sys.executable).with_name("flashpatch-verify"), "--live", "--json"],
        env=grpo_lab.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert live.returncode == 0, live.stdout + live.stderr
    processes = json.loads(live.stdout)["processes"]

    def calls(patch: str, role: str) -> int:
        return sum(
            one["patches"].get(patch, {}).get("calls", 0)
            for one in processes
            if role in one["roles"] or not role
        )

    assert calls("grpo.verl.loss", "trainer") >= 4 and calls("grpo.verl.counts", "trainer") >= 4
    assert calls("grpo.verl.router", "") == 1 and calls("grpo.verl.resubmit", "") == 64


def test_an_equal_seed_gives_the_curve_of_stock_grpo(world, tmp_path):
    """No sample is missing here, so the counts agree with the configuration, and the losses with one
    another."""
    same = ("trainer.total_training_steps=2", "actor_rollout_ref.rollout.full_determinism=True")
    stock = train(world, tmp_path / "stock", "cpu,bf16", *same)
    ours = train(world, tmp_path / "ours", "cpu,bf16,grpo", *same)
    assert "grpo leaves routing to verl: full_determinism" in ours
    for name in ("critic/rewards/mean", "response_length/mean", "actor/grad_norm", "actor/pg_loss"):
        wanted, found = metrics(stock, name), metrics(ours, name)
        assert len(wanted) == 2 and found == pytest.approx(wanted, rel=1e-3, abs=1e-5), name
