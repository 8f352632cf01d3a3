"""What the family changes and refuses in a configuration; neither verl nor torch is needed."""

import pytest

from flashpatch.patches.grpo import verl_config

ACTOR = "actor_rollout_ref.actor"
ON = {"loss": True, "logprobs": False, "router": True, "resubmit": True}


def reader(**settings):
    values = {name.replace("__", "."): value for name, value in settings.items()}
    return lambda path, default=None: values.get(path, default)


@pytest.mark.parametrize("mode", [None, "vanilla", "grpo_exact"])
def test_the_loss_mode_is_set_where_the_user_chose_none(mode):
    get = reader(**{verl_config.LOSS: mode} if mode else {})
    found = [(path, value) for path, value, _ in verl_config.adaptations(get, ON)]
    assert found == [(verl_config.LOSS, "grpo_exact")] * (mode != "grpo_exact")
    assert not list(verl_config.refusals(get, ON))


def test_another_loss_is_refused_unless_ours_is_off():
    get = reader(**{verl_config.LOSS: "gspo", "algorithm.rollout_correction.bypass_mode": True})
    mode, bypass = verl_config.refusals(get, ON)
    rewards = {"distillation.enabled": True, "distillation.distillation_loss.use_task_rewards": False}
    assert "verl drops the policy's loss" in [*verl_config.refusals(reader(**rewards), ON)][0]
    assert "loss_mode=gspo" in mode and "bypass_mode=True" in bypass
    off = {**ON, "loss": False}
    assert not list(verl_config.refusals(get, off)) and not list(verl_config.adaptations(get, off))
    (refusal,) = verl_config.refusals(reader(**{verl_config.LOSS: "grpo_exact"}), off)
    assert refusal.startswith(f"{verl_config.LOSS}=grpo_exact (grpo's option loss is off")


def test_what_the_loss_or_the_clock_would_get_wrong_is_refused():
    """Verl's own loss asserts a dual clip above 1."""
    for bound in (1.0, 0.5):
        dual = reader(**{f"{ACTOR}.clip_ratio_c": bound})
        (refusal,) = verl_config.refusals(dual, ON)
        assert refusal.startswith(f"{ACTOR}.clip_ratio_c={bound} (")
        assert not [*verl_config.refusals(dual, {**ON, "loss": False})]


def test_recorded_experts_are_refused_where_the_streaming_trainer_would_ignore_them():
    replay = {verl_config.REPLAY: True, f"{ACTOR}.strategy": "fsdp2"}
    assert not list(verl_config.refusals(reader(**replay), ON))
    (refusal,) = verl_config.refusals(reader(**replay, **{"trainer.v1.trainer_mode": "stream_async"}), ON)
    assert refusal.startswith(f"{verl_config.REPLAY}=True (stream_async")


@pytest.mark.parametrize(
    ("installed", "engine"), [("0.5.12", "sglang"), ("0.5.23", "sglang"), ("0.5.12", "vllm")]
)
def test_recorded_experts_are_refused_where_they_were_not_found_true(monkeypatch, installed, engine):
    monkeypatch.setattr(verl_config, "version", lambda name: installed)
    get = reader(**{verl_config.REPLAY: True, f"{verl_config.ROLLOUT}.name": engine})
    found = list(verl_config.refusals(get, ON))
    assert len(found) == (installed == "0.5.12" and engine == "sglang")
    assert not found or found[0].startswith(f"{verl_config.REPLAY}=True (SGLang 0.5.12; its record")


def test_a_constant_divisor_is_given_where_verl_would_take_a_width():
    get = reader(**{f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", "data.max_response_length": 512})
    assert (f"{ACTOR}.loss_scale_factor", 512) in [
        (path, value) for path, value, _ in verl_config.adaptations(get, ON)
    ]


def test_parts_that_are_not_used_are_logged():
    unused = {**ON, "reference_every": 0, "max_staleness": 0}
    (batcher,) = verl_config.remarks(reader(), unused)
    assert "batcher is not used" in batcher and "mode sync" in batcher
    get = reader(**{"trainer.use_v1": False, "actor_rollout_ref.rollout.router_config_path": "own.yaml"})
    batcher, reference, router = verl_config.remarks(get, unused | {"reference_every": 4})
    assert "mode legacy" in batcher and "router is not used" in router
    assert "reference_every does nothing in trainer mode legacy" in reference
    (reference,) = verl_config.remarks(
        reader(**{"trainer.v1.trainer_mode": "stream_async"}), {**ON, "reference_every": 4}
    )
    assert "without actor_rollout_ref.actor.use_kl_loss" in reference
