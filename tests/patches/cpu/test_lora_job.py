"""GRPO steps of unmodified verl on LoRA adapters that are not merged."""

from pathlib import Path

import pytest
from tree import SUPPORT
from verl_job import SEPARATE, adapters_of, audits, live, metrics, train, trained

pytestmark = [pytest.mark.verl, pytest.mark.full]

MODEL = "actor_rollout_ref.model"
ADAPTERS = f"{MODEL}.lora_rank=8 {MODEL}.lora_alpha=16 actor_rollout_ref.actor.optim.lr=3e-2".split()
FROM_DISK = "actor_rollout_ref.rollout.load_format=auto"


@pytest.mark.parametrize(
    ("precision", "bound", "more"),
    [("bf16", 0.004, []), ("bf16", 0.004, [FROM_DISK]), ("int8", 0.1, [])],
    ids=["bf16", "bf16-from-disk", "int8"],
)
def test_rollouts_in_processes_of_their_own_follow_the_adapters(
    wide_world: Path, tmp_path: Path, precision: str, bound: float, more: list[str]
) -> None:
    output = trained(wide_world, tmp_path, *SEPARATE, *ADAPTERS, *more, FLASHPATCH=f"cpu,{precision},fsdp")
    assert metrics(output, "training/global_step") == [1, 2]
    assert max(metrics(output, "training/rollout_probs_diff_max")) < bound
    assert min(metrics(output, "actor/grad_norm")) > 0
    sent = adapters_of(tmp_path)
    assert [one["version"] for one in sent] == [1, 2, 3] and len({one["digest"] for one in sent}) == 3
    (audit,) = [note for note in audits(tmp_path) if "audited" in note]
    syncs = 3 if more else 4  # the base is one of its own
    assert (audit["sync"], audit["audited"], audit["failed"], audit["not_audited"]) == (syncs, syncs, 0, 0)
    processes = live(tmp_path)
    (worker,) = [process for process in processes if "worker" in process["roles"]]
    base = 0 if more else 1
    assert worker["patches"]["fp8.vllm.process_weights_after_loading"]["calls"] == 1 + base
    (trainer,) = [process for process in processes if "trainer" in process["roles"]]
    assert trainer["patches"]["fp8.verl.actor_update_weights"]["calls"] == 3


def test_rollouts_beside_the_trainer_follow_the_adapters(wide_world: Path, tmp_path: Path) -> None:
    output = trained(wide_world, tmp_path, *ADAPTERS, FLASHPATCH="cpu,bf16,fsdp")
    assert metrics(output, "training/global_step") == [1, 2]
    assert max(metrics(output, "training/rollout_probs_diff_max")) < 0.004
    assert len({one["digest"] for one in adapters_of(tmp_path)}) == 3
    live(tmp_path)


def test_a_trainer_whose_adapters_do_not_travel_is_stopped_at_the_first_sync(
    wide_world: Path, tmp_path: Path
) -> None:
    done = train(wide_world, tmp_path, *SEPARATE, *ADAPTERS, FROM_DISK, **sabotaged("adapters_dropped"))
    assert done.returncode != 0 and not metrics(done.stdout, "training/global_step")
    assert "the trainer has LoRA adapters (lora_rank=8) and this sync brings none" in done.stdout


def sabotaged(ways: str) -> dict[str, str]:
    return dict(FLASHPATCH="cpu,bf16", PYTHONPATH=str(SUPPORT / "fp8_sabotage"), SABOTAGE=ways)
