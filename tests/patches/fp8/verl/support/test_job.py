"""In a whole job of verl the trainer's probabilities are those that tokens were drawn with, and without the option they are not."""

from pathlib import Path

import pytest
from verl_job import calls, live, metrics, trained

pytestmark = [pytest.mark.verl, pytest.mark.full]

TRUNCATED = (
    *"data.seed=1 actor_rollout_ref.actor.optim.lr=1e-4 actor_rollout_ref.rollout.top_p=0.8".split(),
    *"actor_rollout_ref.rollout.top_k=20 algorithm.rollout_correction.rollout_is=token".split(),
)


def learn(world: Path, folder: Path, width: int, *extra: str) -> str:
    folder.mkdir(exist_ok=True)
    return trained(
        world, folder, *TRUNCATED, *extra, FLASHPATCH="cpu,bf16", config=f"[fp8]\nsupport = {width}\n"
    )


def test_ratios_are_one_with_kept_tokens_and_the_kept_mass_without(world, tmp_path):
    stock = learn(world, tmp_path / "stock", 0)
    assert max(metrics(stock, "mismatch/ratio_mean")) < 0.95
    assert "meets importance ratios" in stock and metrics(stock, "mismatch/kept_mass")
    said = learn(world, tmp_path / "ours", 40, "actor_rollout_ref.model.use_remove_padding=True")
    assert metrics(said, "training/global_step") == [1, 2]
    assert metrics(said, "mismatch/ratio_mean") == pytest.approx([1, 1], abs=5e-3)
    assert max(metrics(said, "mismatch/k3")) < 1e-3 < min(metrics(stock, "mismatch/k3"))
    assert min(metrics(said, "actor/grad_norm")) > 0
    assert "meets importance ratios" not in said and not metrics(said, "mismatch/kept_mass")
    assert "engine_kwargs.vllm.max_logprobs=40" in said
    processes = live(tmp_path / "ours")
    assert (
        calls(processes, "fp8.vllm.generate") == 64 == calls(processes, "fp8.verl.agent_loop_output_as_dict")
    )
    assert calls(processes, "fp8.verl.prepare_model_outputs") >= 4
    assert calls(processes, "fp8.verl.logprobs_from_logits") >= 4
