"""GRPO steps of unmodified verl whose syncs are differences, over gloo, audited."""

from pathlib import Path

import pytest
from verl_job import SEPARATE, live, metrics, of_role, trained

pytestmark = [pytest.mark.verl, pytest.mark.full]


@pytest.mark.parametrize("dtype", ["fp32", "bfloat16"])
def test_a_job_in_which_few_weights_change_sends_few_bytes(
    wide_world: Path, tmp_path: Path, dtype: str
) -> None:
    """In verl's default, fp32, the first sync is in float32, all later ones are in bf16."""
    masters = f"actor_rollout_ref.actor.fsdp_config.model_dtype={dtype}"
    settings = (*SEPARATE, "actor_rollout_ref.actor.optim.lr=1e-6", masters)
    on = dict(FLASHPATCH="cpu,int8,fsdp", config="[fp8]\ndelta_sync = true\n")
    output = trained(wide_world, tmp_path, *settings, **on)
    assert metrics(output, "training/global_step") == [1, 2]
    assert metrics(output, "sync/policy_version") == [2, 3]
    shares = metrics(output, "sync/wire_share")
    assert len(shares) == 2 and 0 < max(shares) < 0.2  # the first of all comes before the first step
    assert min(metrics(output, "sync/changed_share")) > 0
    assert max(metrics(output, "training/rollout_probs_diff_max")) < 0.1
    processes = live(tmp_path)
    (worker,), (trainer,) = of_role(processes, "worker"), of_role(processes, "trainer")
    assert trainer["patches"]["fp8.verl.actor_update_weights_delta"]["calls"] == 3
    assert worker["patches"]["fsdp.verl_vllm.receive_weights"]["calls"] == 3
