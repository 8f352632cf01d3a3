"""FastRL's ``speculative.*`` becomes the family's options and the engine's arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from migrating import loaded, migrate, script

from flashpatch.patches.eagle import from_fastrl
from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.bandit.options import policy_settings
from flashpatch.patches.eagle.verl.verl_config import _trainer_settings

SGLANG = "+actor_rollout_ref.rollout.engine_kwargs.sglang"
RECIPE = """
SPEC=org/drafter
length=$((1024 * 32))
python3 -m verl.trainer.main_fastrl \\
    speculative.eagle.spec_model_path=$SPEC \\
    speculative.enable=true \\
    speculative.bs_threshold=32 \\
    data.max_response_length=${length} \\
    actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.mode=sync
"""


def asked(*settings: str) -> dict:
    """FastRL with these settings below ``speculative``, and a drafter."""
    return migrate(
        "fastrl",
        "actor_rollout_ref.rollout.name=sglang",
        "speculative.eagle.spec_model_path=org/drafter",
        *(f"speculative.{setting}" for setting in settings),
    )


def test_a_script_of_the_published_kind(tmp_path: Path) -> None:
    said = migrate("fastrl", script(tmp_path, RECIPE))
    assert (said["code"], said["enable"]) == (0, ["eagle"])
    arms = ["8_4_48", "8_4_32", "8_4_16", "8_4_8", "disable"]
    assert said["options"]["eagle"] == {
        "drafter": "org/drafter",
        "arms": arms,
        "cotrain": False,
        "capture": False,
    }
    assert said["verl"] == {
        f"{SGLANG}.speculative_num_steps": "8",
        f"{SGLANG}.speculative_eagle_topk": "4",
        f"{SGLANG}.speculative_num_draft_tokens": "48",
        f"{SGLANG}.disable_overlap_schedule": "True",
    }
    assert set(said["take_out"]) == {
        "speculative.eagle.spec_model_path",
        "speculative.enable",
        "speculative.bs_threshold",
        "actor_rollout_ref.rollout.mode",
    }
    whole = "\n".join(said["otherwise"])
    assert "python -m verl.trainer.main_ppo" in whole and "hf download org/drafter" in whole
    options = loaded(said["toml"], tmp_path).choices["eagle"].options
    assert [str(Arm.parse(arm)) for arm in options["arms"]] == arms
    assert policy_settings(options)["rule"] is None


def test_speculation_that_was_off_stays_off() -> None:
    said = asked("enable=false", "train.enable_drafter_training=true")
    assert (said["enable"], said["options"], said["code"]) == ([], {}, 0)


@pytest.mark.parametrize(("theirs", "ours"), from_fastrl.RULES.items())
def test_every_rule(theirs: str, ours: str, tmp_path: Path) -> None:
    said = asked(f"eagle.tune_algorithm={theirs}")
    options = loaded(said["toml"], tmp_path).choices["eagle"].options
    settings = policy_settings(options)
    assert settings["rule"] == ours
    if ours == "predefined":
        assert settings["table"] == {1: "8_4_48", 4: "8_4_32", 20: "8_4_16", 32: "8_4_8"}
    else:
        assert settings["buckets"] == [1, 4, 20, 21]


def test_other_ranges_of_batch_sizes() -> None:
    said = asked("eagle.tune_algorithm=EG", "eagle.mab_bs_threshold=[1,9]")
    assert said["options"]["eagle"]["groups"] == ["8", "9"]
    said = asked("eagle.tune_algorithm=BEG", "eagle.mab_bs_threshold=[1,9,12,13]")
    assert "the rule beg has the ranges 1, 2, 5 and 21" in said["stderr"]
    said = asked("eagle.tune_algorithm=PREDEFINED", "eagle.mab_bs_threshold=[1,9]")
    assert "2 batch sizes for 4 configurations" in said["stderr"] and "table" not in said["options"]["eagle"]


def test_arms_that_the_engine_cannot_draft_are_named() -> None:
    said = asked("eagle.mab_configs=['9_4_8','4_2_16','4_2_8','nonsense']")
    assert said["options"]["eagle"]["arms"] == ["8_4_48", "4_2_8", "disable"]
    for arm, why in {
        "9_4_8": "larger than",
        "4_2_16": "more tokens than its tree",
        "nonsense": "is not steps",
    }.items():
        line = next(
            one for one in said["not_carried_over"] if one.startswith(f"speculative configuration {arm}: ")
        )
        assert why in line


def test_vllm_drafts_chains() -> None:
    said = migrate(
        "fastrl",
        "actor_rollout_ref.rollout.name=vllm",
        "speculative.eagle.spec_model_path=d",
        "speculative.eagle.spec_steps=5",
    )
    assert said["options"]["eagle"]["draft_tokens"] == 5 and "arms" not in said["options"]["eagle"]
    assert said["code"] == 1 and "vLLM drafts chains, no trees" in said["stderr"] and said["verl"] == {}


def test_training_is_taken_over_where_it_has_a_counterpart(tmp_path: Path) -> None:
    said = asked(
        "train.enable_drafter_training=True",
        "train.max_seq_len=2048",
        "train.batch_size_per_gpu=2",
        "train.optim.lr=1e-6",
        "train.data_buffer_max_size=500",
        "train.training_interval_steps=10",
        "train.checkpoint_path=/ckpt",
        "train.optim.min_lr_ratio=null",
        "train.no_such_thing=1",
    )
    eagle = said["options"]["eagle"]
    assert eagle["trainer"] == ["window=2048", "batch=4096", "rate=1e-06", "samples=500"]
    assert eagle["capture_window"] == 2048 and "cotrain" not in eagle
    _trainer_settings(loaded(said["toml"], tmp_path).choices["eagle"].options, "", "", "")
    assert len(said["not_carried_over"]) == 2
    assert "training_interval_steps=10" in said["stderr"] and "no_such_thing=1: not a known" in said["stderr"]
    assert any("checkpoint_path=/ckpt" in line for line in said["otherwise"])


def test_fastrls_own_yaml(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    text = """
speculative:
  enable: true
  spec_strategy: "eagle"
  bs_threshold: 32
  eagle: {spec_model_path: null, spec_steps: 4, spec_topk: 1, spec_verify_tokens: 5, tune_algorithm: "BEG",
          mab_configs: ["3_1_4"], mab_bs_threshold: [1, 2, 5, 21]}
  train: {enable_drafter_training: false, training_interval_steps: 10, optim: {lr: 1e-6}}
actor_rollout_ref: {rollout: {name: sglang}}
"""
    said = migrate("fastrl", script(tmp_path, text, "fastrl.yaml"))
    assert said["options"]["eagle"]["arms"] == ["4_1_5", "3_1_4", "disable"]
    assert f"{SGLANG}.disable_overlap_schedule" not in said["verl"]
    assert "spec_model_path: not given" in said["stderr"]


def test_what_nobody_knows_is_no_drafter_strategy() -> None:
    assert "spec_strategy=medusa" in asked("spec_strategy=medusa")["stderr"]
    assert "'x' is not a number" in asked("eagle.spec_steps=x")["stderr"]
