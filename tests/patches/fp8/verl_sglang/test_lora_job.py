"""GRPO steps of unmodified verl on LoRA adapters that are not merged, whose rollouts are SGLang's."""

import pytest
from verl_job import adapters_of, check_learned, live, of_role, trained

pytestmark = [
    pytest.mark.verl,
    pytest.mark.sglang(least="0.5.21"),  # to 0.5.12 verl sends a request that it does not have
    pytest.mark.full,
]

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
FROM_DISK = f"{ROLLOUT}.load_format=auto"
ADAPTERS = (
    f"{MODEL}.lora_rank=8",
    f"{MODEL}.lora_alpha=16",
    f"{MODEL}.target_modules=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]",
    "actor_rollout_ref.actor.optim.lr=3e-2",
)
QUANTIZED = dict(STANDIN_AMX="1", TORCHDYNAMO_DISABLE="1")


@pytest.mark.parametrize(
    ("precision", "bound", "more"),
    [("bf16", 0.01, []), ("bf16", 0.01, [FROM_DISK]), ("int8", 0.1, [])],
    ids=["bf16", "bf16-from-disk", "int8"],
)
def test_rollouts_follow_the_adapters(wide_world, tmp_path, precision, bound, more):
    settings = (f"{ROLLOUT}.name=sglang", *ADAPTERS, *more)
    output = trained(wide_world, tmp_path, *settings, FLASHPATCH=f"cpu,{precision}", **QUANTIZED)
    check_learned(output, bound)
    sent = adapters_of(tmp_path)
    assert [one["version"] for one in sent] == [1, 2, 3] and len({one["digest"] for one in sent}) == 3
    (worker,) = of_role(live(tmp_path), "worker")
    assert worker["patches"]["fp8.sglang_lora.load_lora_adapter_from_tensors"]["calls"] == 3
