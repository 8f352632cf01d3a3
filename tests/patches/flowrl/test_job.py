"""Two FlowRL steps of unmodified verl with real rollouts."""

import pytest
import verl_job
from verl_job import check_learned, live, metrics, of_role, trained

pytestmark = pytest.mark.verl

FLOWRL = {"FLASHPATCH": "cpu,bf16,flowrl"}
SETTINGS = ("actor_rollout_ref.actor.optim.lr=1e-3",)


@pytest.mark.full  # over 100 s where nothing else runs
def test_two_steps_with_updated_rollouts(world, tmp_path):
    told = trained(world, tmp_path, *SETTINGS, **FLOWRL)
    check_learned(told, 0.01)
    for name in ("logpf", "logp_ref", "log_z", "log_reward", "tb_loss", "tb_residual_mean"):
        assert len(metrics(told, f"actor/{name}")) == 2, name
    assert min(metrics(told, "actor/tb_loss")) > 0
    assert "policy_loss.loss_mode=flowrl: FlowRL needs it" in told
    processes = live(tmp_path)
    (trainer,) = of_role(processes, "trainer")
    calls = {name: patch["calls"] for name, patch in trainer["patches"].items()}
    # two micro-batches in each step
    assert calls["flowrl.verl.ppo_loss"] == calls["flowrl.verl.register_policy_loss"] == 4
    assert calls["flowrl.verl.convert_weight_keys"] == 3  # before the first step and after each
    assert calls["flowrl.verl.build_module"] == 2  # the actor's and the reference's, which gets none
    assert verl_job.calls(of_role(processes, "driver"), "flowrl.verl.validate_config")


@pytest.mark.full
def test_two_ranks_that_share_every_row_and_audited_fp8_rollouts(wide_world, two_ranks, tmp_path):
    """Ulysses on FSDP2, with the families fp8 and fsdp."""
    settings = (
        *SETTINGS,
        *two_ranks,
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.ref.strategy=fsdp2",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    )
    told = trained(wide_world, tmp_path, *settings, FLASHPATCH="cpu,fp8,flowrl,fsdp")
    assert metrics(told, "training/global_step") == [1, 2]
    assert max(metrics(told, "training/rollout_probs_diff_mean")) < 0.05
    assert min(metrics(told, "actor/grad_norm")) > 0
    trainers = of_role(live(tmp_path), "trainer")
    shared = [p["patches"]["cpu.verl.ulysses_flash_attention_forward"]["calls"] for p in trainers]
    assert len(shared) == 2 and shared[0] == shared[1] > 0


@pytest.mark.full
def test_two_steps_of_adapters_and_the_partition_function(world, tmp_path):
    """LoRA: the rollout gets merged weights, and the reference is the model without adapters."""
    model = "actor_rollout_ref.model"
    adapters = (f"{model}.lora_rank=8", f"{model}.lora_alpha=16", f"{model}.lora.merge=True")
    told = trained(world, tmp_path, *SETTINGS, *adapters, **FLOWRL)
    check_learned(told, 0.01)
    assert len(metrics(told, "actor/log_z")) == 2
    (trainer,) = of_role(live(tmp_path), "trainer")
    assert trainer["patches"]["flowrl.verl.build_lora_module"]["calls"] == 1


@pytest.mark.full
def test_two_steps_with_log_z_of_the_group(world, tmp_path):
    """Raw rewards, log Z in the driver, no partition function."""
    config = '[flowrl]\nlog_z = "group"\nreward = "raw"\nbeta = 3.0\n'
    told = trained(world, tmp_path, *SETTINGS, config=config, **FLOWRL)
    assert metrics(told, "training/global_step") == [1, 2]
    assert min(metrics(told, "actor/grad_norm")) > 0 and min(metrics(told, "actor/tb_loss")) > 0
    assert not metrics(told, "actor/log_z") and len(metrics(told, "actor/log_reward")) == 2
    assert verl_job.calls(of_role(live(tmp_path), "driver"), "flowrl.verl.compute_advantage") == 2
