"""FlowRL together with the other families: quantized rollouts, drafters, streamed training, SGLang."""

from pathlib import Path

import pytest
import sglang_lab
from verl_job import STREAM, live, metrics, trained

pytestmark = [pytest.mark.verl, pytest.mark.full]

RATE = "actor_rollout_ref.actor.optim.lr=1e-3"
DRAFTER = """
[eagle]
drafter = "new"
train_seconds = 10.0
trainer = ["rate=3e-3", "least=4", "batch=256", "dtype=float32"]
"""


def check(told: str, folder: Path) -> dict[str, int]:
    """Check two steps that learned by FlowRL from rollouts that follow the policy; return calls by patch."""
    assert metrics(told, "training/global_step") == [1, 2]
    assert max(metrics(told, "training/rollout_probs_diff_mean")) < 0.05
    assert min(metrics(told, "actor/grad_norm")) > 0 and min(metrics(told, "actor/tb_loss")) > 0
    assert len(metrics(told, "actor/log_z")) == 2
    calls: dict[str, int] = {}
    for process in live(folder):
        for name, patch in process["patches"].items():
            calls[name] = calls.get(name, 0) + (patch.get("calls") or 0)
    assert calls["flowrl.verl.ppo_loss"] > 0 and calls["flowrl.verl.convert_weight_keys"] >= 3
    return calls


def test_quantized_audited_rollouts_with_a_drafter_that_learns(world, tmp_path):
    told = trained(world, tmp_path, RATE, FLASHPATCH="cpu,fp8,fsdp,eagle,flowrl", config=DRAFTER)
    calls = check(told, tmp_path)
    assert calls["eagle.vllm.sample_tokens"] > 0 and min(metrics(told, "eagle/acceptance_length")) >= 1
    assert metrics(told, "eagle/drafter_version")


def test_streamed_training(world, tmp_path):
    """The family grpo streams; its loss, which is another, is off."""
    names = {"FLASHPATCH": "cpu,fp8,fsdp,grpo,flowrl", "config": "[grpo]\nloss = false\n"}
    told = trained(world, tmp_path, *STREAM, RATE, **names)
    check(told, tmp_path)
    assert metrics(told, "actor/samples") == [32, 32]
    assert min(metrics(told, "stream/rounds")) >= 2


@pytest.mark.sglang
def test_rollouts_of_sglang(wide_world, tmp_path):
    settings = ("actor_rollout_ref.rollout.name=sglang", RATE)
    kernels = {"STANDIN_AMX": "1", "TORCHDYNAMO_DISABLE": "1"}
    told = trained(wide_world, tmp_path, *settings, FLASHPATCH="cpu,fp8,fsdp,flowrl", **kernels)
    calls = check(told, tmp_path)
    brought = "sglang_0_5_12.update_weights_from_tensor" if sglang_lab.OLD else "sglang.begin_weight_update"
    assert calls[f"fp8.{brought}"] >= 3
