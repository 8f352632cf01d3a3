"""In a whole job of verl both sides compute the head in float32, and are nearer to each other than with heads in bf16."""

from pathlib import Path

import pytest
from verl_job import calls, live, metrics, trained

pytestmark = [pytest.mark.verl, pytest.mark.full]

SETTINGS = (
    "data.seed=1",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
)


def learn(world: Path, folder: Path, lm_head: str) -> str:
    folder.mkdir()
    return trained(world, folder, *SETTINGS, FLASHPATCH="cpu,bf16", config=f'[fp8]\nlm_head = "{lm_head}"\n')


def test_rollout_and_trainer_are_nearer(world, tmp_path):
    stock = learn(world, tmp_path / "stock", "")
    ours = learn(world, tmp_path / "ours", "float32")
    assert max(metrics(ours, "mismatch/k3")) < 0.5 * min(metrics(stock, "mismatch/k3"))
    assert min(metrics(ours, "actor/grad_norm")) > 0
    processes = live(tmp_path / "ours")
    assert calls(processes, "fp8.verl.build_module") >= 1
    assert calls(processes, "fp8.vllm_0_24.get_logits") >= 8
