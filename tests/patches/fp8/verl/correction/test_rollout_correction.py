"""When truncated importance sampling is switched on, and when the config is left alone."""

from typing import Any

import pytest

from flashpatch.patches.fp8.verl.verl_config import ASKED, CORRECTION, MODE, decide, frozen, precisions

OPTIONS = {"precision": "int8", "scheme": "", "fleet": []}
DEFAULTS = {MODE: "processed_logprobs", ASKED: True, f"{CORRECTION}.rollout_is_threshold": 2.0}


def decided(
    tis: str = "auto", rolled: tuple[str, ...] = ("int8",), typed: set[str] = frozenset(), **settings: Any
):
    recipe = {**DEFAULTS, **{key.replace("__", "."): value for key, value in settings.items()}}
    return decide(lambda path, default=None: recipe.get(path, default), tis, rolled, typed)


def test_on_for_quantized_rollouts_where_nobody_chose() -> None:
    assert decided() == (True, "rollouts are quantized, and the config sets no correction")
    assert decided(rolled=("bf16", "fp8"))[0]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (dict(tis="off"), "the option tis is off"),
        (dict(rolled=("bf16",)), "rollouts run in bf16"),
        (dict(typed={f"{CORRECTION}.rollout_is"}), "the config sets algorithm.rollout_correction.rollout_is"),
        (dict(typed={CORRECTION}), "the config sets algorithm.rollout_correction"),
        (dict(algorithm__rollout_correction__rollout_is="sequence"), "rollout_is"),
        (dict(algorithm__rollout_correction__rollout_rs="token_k1"), "rollout_rs"),
        (dict(algorithm__rollout_correction__bypass_mode=True), "bypass_mode"),
        ({MODE.replace(".", "__"): "raw_logprobs"}, f"the config sets {MODE}=raw_logprobs"),
        ({ASKED.replace(".", "__"): False}, f"the config sets {ASKED}=False"),
    ],
)
def test_off_otherwise_and_it_says_why(how: dict[str, Any], why: str) -> None:
    switched, said = decided(**how)
    assert not switched and why in said


def test_precisions_of_the_rollouts() -> None:
    assert precisions(OPTIONS, None) == ("int8",)
    fleet = [{"precision": "bf16"}, {"precision": "fp8"}, {"precision": "bf16"}]
    assert precisions({**OPTIONS, "fleet": fleet}, None) == ("bf16", "fp8")
    assert precisions({**OPTIONS, "precision": "bf16"}, "fp8") == ("fp8",)


def test_models_that_no_update_reaches_are_named() -> None:
    job = {"reward.reward_model.model_path": "judge", "distillation.teacher_models": {"a": {}, "b": {}}}
    assert not list(frozen(job.get))
    job |= {"reward.reward_model.enable": True, "distillation.enabled": True}
    job["distillation.teacher_models.a.model_path"] = "teacher"
    assert [model for _, model in frozen(job.get)] == ["judge", "teacher"]
