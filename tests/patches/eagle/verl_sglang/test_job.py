"""Jobs of unmodified verl over SGLang whose drafter starts as noise and is trained between rollouts."""

import pytest
from eagle_cotraining import STEPS, check_acceptance_rises, check_job, job, notes
from verl_job import live

pytestmark = [pytest.mark.verl, pytest.mark.sglang(least="0.5.17"), pytest.mark.full]

BACKENDS = ("prefill", "decode", "speculative_draft")
SGLANG = (
    "actor_rollout_ref.rollout.name=sglang",
    # Without AMX tiles SGLang takes torch_native, in which its drafters do not run; the stand-ins can do the other.
    *(
        f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{part}_attention_backend=intel_amx"
        for part in BACKENDS
    ),
)
ON = {"TORCHDYNAMO_DISABLE": "1"}
CALLED = ("verify", "release_kv_cache", "get_internal_state", "end_weight_update")


def test_acceptance_rises_with_co_training(world, tmp_path):
    said = job(world, tmp_path, *SGLANG, on=ON)
    processes = live(tmp_path)
    worker = next(row for row in processes if "worker" in row["roles"])
    for name in CALLED:
        assert worker["patches"][f"eagle.sglang.{name}"]["calls"] > 0, name
    found = notes(tmp_path)
    check_job(said, found, worker["pid"], worker["pid"])
    assert found[worker["pid"]]["eagle_policy"] == STEPS + 1


def test_an_eagle3_drafter_is_made_and_trained_on_the_trainers_states(verl_world, tmp_path):
    """Over two draft steps, and with the target's head, which is written for SGLang."""
    how = dict(drafter="new-eagle3", trainer=', "ttt_steps=2"', on=ON)
    check_acceptance_rises(job(verl_world("--layers", "8"), tmp_path, *SGLANG, **how))
