"""Which settings and options the family refuses; neither verl nor torch is needed."""

from types import SimpleNamespace

import pytest

from flashpatch import engine
from flashpatch.errors import PatchError
from flashpatch.patches.flowrl import FAMILY, options, verl_config
from flashpatch.patches.flowrl.loss import clip_range
from flashpatch.settings.options import checked, defaults

ACTOR = verl_config.ACTOR
PLAIN = {
    verl_config.LOSS_MODE: "vanilla",
    verl_config.USE_KL: False,
    verl_config.KL_COEF: 0.001,
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    f"{ACTOR}.strategy": "fsdp",
}


def reader(**changes):
    settings = {**PLAIN, **changes}
    return lambda path, default=None: settings.get(path, default)


def test_verls_own_values_are_accepted():
    assert list(verl_config.refusals(reader())) == []
    assert list(verl_config.refusals(reader(**verl_config.REQUIRED), set(verl_config.REQUIRED))) == []


@pytest.mark.parametrize(
    "path, value",
    [
        (verl_config.LOSS_MODE, "gspo"),
        (verl_config.KL_COEF, 0.01),
        ("algorithm.use_kl_in_reward", True),
        ("algorithm.adv_estimator", "gae"),
        ("algorithm.rollout_correction.bypass_mode", True),
        ("distillation.enabled", True),
        (f"{ACTOR}.strategy", "megatron"),
        (f"{ACTOR}.strategy", "veomni"),
        (f"{ACTOR}.fsdp_config.qat.enable", True),
        (f"{ACTOR}.use_prefix_grouper", True),
    ],
)
def test_what_contradicts_flowrl_is_refused_by_name(path, value):
    (refusal,) = verl_config.refusals(reader(**{path: value}))
    assert refusal.startswith(f"{path}={value} (")


def test_a_clip_range_that_is_not_set_is_clip_ratio():
    config = SimpleNamespace(clip_ratio=0.3, clip_ratio_low=None, clip_ratio_high=0.4)
    assert clip_range(config) == {"low": 0.3, "high": 0.4}


def test_checkpoints_of_adapters_alone_are_refused_where_there_is_a_partition_function():
    lora_only = reader(**{verl_config.LORA_ONLY: True})
    (refusal,) = verl_config.learned_refusals(lora_only)
    assert refusal.startswith(f"{verl_config.LORA_ONLY}=True (")
    assert not list(verl_config.learned_refusals(reader()))
    assert not list(verl_config.group_refusals(lora_only))


@pytest.mark.parametrize(
    "setting, value",
    [
        (verl_config.SAMPLES, 1),
        (verl_config.TRAINER_MODE, "stream_async"),
        ("actor_rollout_ref.rollout.top_p", 0.9),
    ],
)
def test_a_group_needs_several_responses_and_their_reference(setting, value):
    (refusal,) = verl_config.group_refusals(lambda path, default=None: {setting: value}.get(path, default))
    assert refusal.startswith(f"{setting}={value} (")
    plain = {verl_config.SAMPLES: 8, verl_config.TRAINER_MODE: "sync"}
    assert list(verl_config.group_refusals(lambda path, default=None: plain.get(path, default))) == []


def test_options_of_the_partition_function_are_named_where_there_is_none(monkeypatch):
    chosen = {**defaults(FAMILY), "log_z": "group", "reward": "raw", "beta": 3.0, "length": "sum"}
    monkeypatch.setattr(engine, "options", lambda family: chosen)
    assert list(options.contradictions()) == []
    chosen |= {"lr": 1e-4, "num_layers": 2}
    assert list(options.contradictions()) == [
        f"{named} with log_z='group' (there is no partition function)"
        for named in ("num_layers=2", "lr=0.0001")
    ]


@pytest.mark.parametrize(
    "path, value",
    [(verl_config.LOSS_MODE, "vanilla"), (verl_config.USE_KL, False), (verl_config.KL_COEF, 0.001)],
)
def test_verls_own_value_on_the_command_line_is_refused(path, value):
    (refusal,) = verl_config.refusals(reader(), {path})
    assert refusal.startswith(f"{path}={value} (")


WRONG = dict(beta=-1.0, num_layers=0, dropout=1.0, weight_cap=0.0, lr=-1e-3, weight_decay=-0.1)
WRONG |= dict(weight="ppo", length="max", log_z="exact", reward="normalised", detach_hidden="yes")


@pytest.mark.parametrize("name, value", [*WRONG.items(), ("beta", float("nan"))])
def test_an_option_out_of_range_is_named(name, value):
    with pytest.raises(PatchError, match=rf"flowrl\] option '{name}' in enable.. is {value!r}, not "):
        checked(FAMILY, {name: value}, "enable()")
    assert checked(FAMILY, defaults(FAMILY), "enable()") == defaults(FAMILY)
