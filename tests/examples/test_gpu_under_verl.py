"""verl's driver takes the configurations of ``examples/gpu``, and so do the families' own checks."""

import shutil
from pathlib import Path

import pytest
from gpu_recipes import GPU, Recipe, recorded
from verl_driver import refused, validated

pytestmark = pytest.mark.verl
ROLLOUT = "actor_rollout_ref.rollout"
SPECULATION = f"{ROLLOUT}.engine_kwargs"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with its tokenizer: the driver reads the critic's."""
    import verl_job

    return str(verl_job.make_world(tmp_path_factory.mktemp("world")) / "model")


@pytest.fixture
def drafter(tmp_path: Path, model: str) -> str:
    return str(shutil.copytree(model, tmp_path / "drafter"))


def started(recipe: Recipe, folder: Path, *wanted: str, **changes: str):
    return validated(recipe.overrides, folder, wanted, **{**recipe.variables, **changes})


def test_gsm8k_in_fp8(model: str, tmp_path: Path) -> None:
    recipe = recorded(GPU / "gsm8k_fp8.sh", tmp_path, MODEL=model)
    wanted = {"algorithm.rollout_correction.rollout_is": "token", "algorithm.adv_estimator": "gae"}
    found, _ = started(recipe, tmp_path, *wanted)
    assert found["settings"] == wanted
    assert found["states"]["fp8.verl.validate_config_correction"].startswith(("live", "installed"))


@pytest.mark.full
def test_flowrl_7b(model: str, tmp_path: Path) -> None:
    recipe = recorded(GPU / "flowrl_7b.sh", tmp_path, MODEL=model)
    actor = "actor_rollout_ref.actor"
    wanted = {f"{actor}.policy_loss.loss_mode": "flowrl", f"{actor}.kl_loss_coef": 0}
    wanted |= {"data.train_batch_size": 512}
    found, _ = started(recipe, tmp_path, *wanted)
    assert found["settings"] == wanted
    assert found["states"]["flowrl.verl.validate_config"].startswith(("live", "installed"))


@pytest.mark.full
def test_eagle_7b_on_vllm(model: str, drafter: str, tmp_path: Path) -> None:
    recipe = recorded(GPU / "eagle_7b.sh", tmp_path, MODEL=model, DRAFTER=drafter)
    found, said = started(
        recipe, tmp_path, f"{SPECULATION}.vllm.speculative_config", f"{SPECULATION}.flashpatch"
    )
    speculation, training = found["settings"].values()
    assert speculation == {"method": "eagle", "model": drafter, "num_speculative_tokens": 5}
    assert '"rate": 1e-06' in training["eagle"] and "trains no drafter" not in said


@pytest.mark.full
def test_eagle_7b_on_sglang(model: str, drafter: str, tmp_path: Path) -> None:
    recipe = recorded(GPU / "eagle_7b.sh", tmp_path, MODEL=model, DRAFTER=drafter, ROLLOUT="sglang")
    found, said = started(recipe, tmp_path, f"{SPECULATION}.sglang", f"{SPECULATION}.flashpatch")
    sglang, training = found["settings"].values()
    assert (sglang["speculative_num_steps"], sglang["speculative_eagle_topk"]) == (8, 4)
    assert sglang["enable_draft_weights_cpu_backup"] is True  # what the family adds
    assert training and "trains no drafter" not in said


def test_a_setting_that_contradicts_flowrl_is_refused(model: str, tmp_path: Path) -> None:
    setting = "actor_rollout_ref.actor.kl_loss_coef=0.001"
    recipe = recorded(GPU / "flowrl_7b.sh", tmp_path, setting, MODEL=model)
    assert f"cannot train with {setting}" in refused(recipe.overrides, tmp_path, **recipe.variables)
