"""GRPO steps of unmodified verl on LoRA adapters that are not merged."""

from pathlib import Path

import pytest
from tree import SUPPORT
from verl_job import SEPARATE, adapters_of, audits, check_learned, live, metrics, of_role, train, trained

pytestmark = [pytest.mark.verl, pytest.mark.full]

MODEL = "actor_rollout_ref.model"
ADAPTERS = f"{MODEL}.lora_rank=8 {MODEL}.lora_alpha=16 actor_rollout_ref.actor.optim.lr=3e-2".split()
FROM_DISK = "actor_rollout_ref.rollout.load_format=auto"


@pytest.mark.parametrize(
    ("precision", "bound", "more"),
    [("bf16", 0.004, []), ("bf16", 0.004, [FROM_DISK]), ("int8", 0.1, [])],
    ids=["bf16", "bf16-from-disk", "int8"],
)
def test_rollouts_in_processes_of_their_own_follow_the_adapters(wide_world, tmp_path, precision, bound, more):
    output = trained(wide_world, tmp_path, *SEPARATE, *ADAPTERS, *more, FLASHPATCH=f"cpu,{precision},fsdp")
    check_learned(output, bound)
    sent = adapters_of(tmp_path)
    assert [one["version"] for one in sent] == [1, 2, 3] and len({one["digest"] for one in sent}) == 3
    (audit,) = [note for note in audits(tmp_path) if "audited" in note]
    syncs = 3 if more else 4  # the base is one of its own
    assert (audit["sync"], audit["audited"], audit["failed"], audit["not_audited"]) == (syncs, syncs, 0, 0)
    processes = live(tmp_path)
    (worker,), (trainer,) = of_role(processes, "worker"), of_role(processes, "trainer")
    base = 0 if more else 1
    assert worker["patches"]["fp8.vllm.process_weights_after_loading"]["calls"] == 1 + base
    assert trainer["patches"]["fp8.verl.actor_update_weights"]["calls"] == 3


def test_rollouts_beside_the_trainer_follow_the_adapters(wide_world: Path, tmp_path: Path) -> None:
    output = trained(wide_world, tmp_path, *ADAPTERS, FLASHPATCH="cpu,bf16,fsdp")
    check_learned(output, 0.004)
    assert len({one["digest"] for one in adapters_of(tmp_path)}) == 3
    live(tmp_path)


def test_a_trainer_whose_adapters_do_not_travel_is_stopped_at_the_first_sync(wide_world, tmp_path):
    env = dict(PYTHONPATH=str(SUPPORT / "fp8_sabotage"), SABOTAGE="adapters_dropped")
    done = train(wide_world, tmp_path, *SEPARATE, *ADAPTERS, FROM_DISK, FLASHPATCH="cpu,bf16", **env)
    assert done.returncode != 0 and not metrics(done.stdout, "training/global_step")
    assert "the trainer has LoRA adapters (lora_rank=8) and this sync brings none" in done.stdout
