"""Jobs of unmodified verl over SGLang whose drafter starts as noise and is trained between rollouts."""

from pathlib import Path

import pytest
from eagle_cotraining import STEPS, check_acceptance_rises, first_architectures, notes
from verl_job import live, metrics, trained

pytestmark = [pytest.mark.verl, pytest.mark.sglang(least="0.5.21"), pytest.mark.full]

BACKENDS = ("prefill", "decode", "speculative_draft")
SETTINGS = (
    "actor_rollout_ref.rollout.name=sglang",
    "data.max_response_length=40",
    "actor_rollout_ref.rollout.max_model_len=96",
    "actor_rollout_ref.rollout.temperature=0.05",  # a random model's answers are not all alike otherwise
    "actor_rollout_ref.actor.optim.lr=1e-4",
    f"trainer.total_training_steps={STEPS}",
    # Without AMX tiles SGLang takes torch_native, in which its drafters do not run; the stand-ins can do the other.
    *(
        f"+actor_rollout_ref.rollout.engine_kwargs.sglang.{part}_attention_backend=intel_amx"
        for part in BACKENDS
    ),
)
CONFIG = """
[eagle]
drafter = "{drafter}"
train_seconds = 20.0
trainer = ["rate=3e-3", "least=4", "batch=256", "dtype=float32"{trainer}]
"""


def job(world: Path, folder: Path, *extra: str, drafter: str = "new", trainer: str = "") -> str:
    where = (f"trainer.default_local_dir={folder}/saved", f"hydra.run.dir={folder}/hydra")
    names = dict(
        FLASHPATCH="cpu,bf16,eagle",
        config=CONFIG.format(drafter=drafter, trainer=trainer),
        TORCHDYNAMO_DISABLE="1",
    )
    return trained(world, folder, *SETTINGS, *where, *extra, **names)


def test_acceptance_rises_with_co_training(world, tmp_path):
    said = job(world, tmp_path)
    assert metrics(said, "training/global_step") == list(range(1, STEPS + 1))
    check_acceptance_rises(said)
    assert max(metrics(said, "training/rollout_probs_diff_max")) < 0.1  # at this temperature
    counted = metrics(said, "rollout/spec_accept_length")
    assert len(counted) == STEPS and counted[-1] > counted[0] >= 1.0, counted

    # who captured, who trained, and who brought it over, each in a row of its own
    processes = live(tmp_path)
    worker = next(row for row in processes if "worker" in row["roles"])
    for name in (
        "verify",
        "release_kv_cache",
        "get_internal_state",
        "begin_weight_update",
        "end_weight_update",
    ):
        assert worker["patches"][f"eagle.sglang.{name}"]["calls"] > 0, name
    found = notes(tmp_path)
    assert found[worker["pid"]]["eagle_capture"]["requests"] > 0
    assert found[worker["pid"]]["eagle_drafter"]["version"] >= 2
    assert found[worker["pid"]]["eagle_policy"] == STEPS + 1
    [trainer] = [pid for pid, noted in found.items() if "eagle_training" in noted]
    [driving] = [pid for pid, noted in found.items() if "eagle_trainer" in noted]
    assert len({worker["pid"], trainer, driving}) == 3
    assert found[trainer]["eagle_training"]["step"] > 0


@pytest.mark.sglang(least="0.5.23")
def test_an_eagle3_drafter_is_made_captured_for_and_trained(verl_world, tmp_path):
    said = job(verl_world("--layers", "8"), tmp_path, drafter="new-eagle3", trainer=', "ttt_steps=2"')
    check_acceptance_rises(said)
    assert first_architectures(tmp_path) == ["LlamaForCausalLMEagle3"]
