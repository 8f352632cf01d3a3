"""In a whole job of verl both sides compute the head in float32, and are nearer to each other than with heads in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
from verl_job import live, metrics, train

pytestmark = [pytest.mark.verl, pytest.mark.full]

SETTINGS = (
    "data.seed=1",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
)


def learn(world: Path, folder: Path, lm_head: str) -> str:
    folder.mkdir()
    config = folder / "flashpatch.toml"
    config.write_text(f'[fp8]\nlm_head = "{lm_head}"\n')
    done = train(world, folder, *SETTINGS, FLASHPATCH="cpu,bf16", FLASHPATCH_CONFIG=str(config))
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def test_rollout_and_trainer_are_nearer(world, tmp_path):
    stock = learn(world, tmp_path / "stock", "")
    ours = learn(world, tmp_path / "ours", "float32")
    assert max(metrics(ours, "mismatch/k3")) < 0.5 * min(metrics(stock, "mismatch/k3"))
    assert min(metrics(ours, "actor/grad_norm")) > 0
    processes = live(tmp_path / "ours")

    def calls(patch: str) -> int:
        return sum(one["patches"].get(patch, {}).get("calls", 0) for one in processes)

    assert calls("fp8.verl.build_module") >= 1 and calls("fp8.vllm_0_24.get_logits") >= 8
