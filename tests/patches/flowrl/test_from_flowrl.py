"""The settings of FlowRL's published code, and of its recipe for verl, become the family's options."""

from __future__ import annotations

from pathlib import Path

import pytest
from migrating import loaded, migrate, script

ACTOR = "actor_rollout_ref.actor"
RECIPE = f"""
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    +{ACTOR}.tb_type=tempered_important_sampling \\
    +{ACTOR}.porj_layer=3 \\
    {ACTOR}.use_kl_loss=True \\
    {ACTOR}.kl_loss_coef=0.001 \\
    {ACTOR}.kl_loss_type=low_var_kl \\
    trainer.logger=['console','wandb'] $@
"""


def test_a_script_of_the_published_kind(tmp_path: Path) -> None:
    said = migrate("flowrl", script(tmp_path, RECIPE))
    assert (said["code"], said["enable"], said["options"]) == (0, ["flowrl"], {"flowrl": {"paper": True}})
    assert said["take_out"] == [f"{ACTOR}.porj_layer", f"{ACTOR}.tb_type"]
    assert said["verl"] == {f"{ACTOR}.kl_loss_coef": "0", "actor_rollout_ref.rollout.name": "vllm"}
    assert loaded(said["toml"], tmp_path).choices["flowrl"].options["paper"] is True


def test_other_layers_are_no_papers() -> None:
    said = migrate("flowrl", f"+{ACTOR}.porj_layer=5")
    assert said["options"] == {"flowrl": {"num_layers": 5}}
    assert migrate("flowrl", f"+{ACTOR}.porj_layer=many")["code"] == 1
    assert "num_layers in [flowrl] does not take 0" in migrate("flowrl", f"+{ACTOR}.porj_layer=0")["stderr"]


def test_another_loss_is_lost() -> None:
    said = migrate("flowrl", f"+{ACTOR}.tb_type=other")
    assert (
        said["code"] == 1
        and f"+{ACTOR}.tb_type=other: only" in said["stderr"]
        and said["options"] == {"flowrl": {"num_layers": 3}}
    )


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("vanilla", {"weight": "raw"}),
        ("flowrl_clip", {"weight": "clip"}),
        ("flowrl_clip_tis", {"weight": "raw", "weight_cap": 10.0}),
    ],
)
def test_the_recipes_losses(variant: str, options: dict, tmp_path: Path) -> None:
    text = f"""
    export FLOWRL_LOSS_VARIANT="{variant}"
    python3 -m recipe.flowrl.main_flowrl algorithm.tb_coef=5 algorithm.adv_estimator=grpo \\
        {ACTOR}.tis_imp_ratio_cap=2 {ACTOR}.use_kl_loss=False reward_model.overlong_buffer.len=4096 \\
        actor_rollout_ref.rollout.name=vllm
    """
    said = migrate("flowrl", script(tmp_path, text))
    assert said["options"] == {"flowrl": {**options, "beta": 5.0}} and said["code"] == 0
    sequence = variant == "flowrl_clip_tis"
    assert said["verl"]["algorithm.rollout_correction.rollout_is"] == ("sequence" if sequence else "token")
    assert said["verl"][f"{ACTOR}.use_kl_loss"] == "True"
    assert said["verl"]["+reward.reward_kwargs.overlong_buffer_cfg.len"] == "4096"
    assert (f"{ACTOR}.clip_ratio_high" in said["verl"]) == (variant == "flowrl_clip")
    assert loaded(said["toml"], tmp_path).choices["flowrl"].options["beta"] == 5.0


@pytest.mark.parametrize("setting", ["FLOWRL_LOSS_VARIANT=flowrl_cispo", "algorithm.use_kl_in_reward=True"])
def test_what_there_is_not(setting: str) -> None:
    said = migrate("flowrl", setting)
    assert said["code"] == 1 and f"not carried over: {setting}: " in said["stderr"]


def test_a_reward_manager_of_the_fork() -> None:
    said = migrate("flowrl", "reward_model.reward_manager=naive_code")
    assert said["take_out"] == ["reward_model.reward_manager"] and "custom_reward_function" in said["stderr"]
    assert migrate("flowrl", "reward_model.reward_manager=dapo")["take_out"] == []


def test_a_script_without_its_settings_says_so() -> None:
    said = migrate("flowrl", f"{ACTOR}.optim.lr=1e-6")
    assert said["code"] == 1 and "FlowRL's settings: none was found" in said["stderr"]
