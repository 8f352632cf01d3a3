"""What the family makes of a recipe, read from the recipe alone: neither verl nor torch is needed."""

from __future__ import annotations

import pytest

from flashpatch.patches.grpo import recipe

ACTOR = "actor_rollout_ref.actor"
ON = {"loss": True, "router": True}


def reader(**settings):
    values = {name.replace("__", "."): value for name, value in settings.items()}
    return lambda path, default=None: values.get(path, default)


@pytest.mark.parametrize("mode", [None, "vanilla"])
def test_the_loss_mode_is_set_where_nobody_chose_one(mode):
    get = reader(**{recipe.LOSS: mode} if mode else {})
    assert [(path, value) for path, value, _ in recipe.adaptations(get, ON)] == [(recipe.LOSS, "grpo_exact")]
    assert not list(recipe.refusals(get, ON))


def test_one_that_names_it_is_left_as_it_is():
    get = reader(**{recipe.LOSS: "grpo_exact"})
    assert not list(recipe.adaptations(get, ON)) and not list(recipe.refusals(get, ON))


def test_another_loss_is_refused_unless_ours_is_off():
    get = reader(**{recipe.LOSS: "gspo", "algorithm.rollout_correction.bypass_mode": True})
    mode, bypass = recipe.refusals(get, ON)
    assert "loss_mode=gspo" in mode and "bypass_mode=True" in bypass
    off = {**ON, "loss": False}
    assert not list(recipe.refusals(get, off)) and not list(recipe.adaptations(get, off))


def test_a_constant_divisor_is_given_where_verl_would_take_a_width():
    get = reader(**{f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", "data.max_response_length": 512})
    assert (f"{ACTOR}.loss_scale_factor", 512) in [
        (path, value) for path, value, _ in recipe.adaptations(get, ON)
    ]


def test_what_stands_aside_is_said():
    (batcher,) = recipe.remarks(reader(), ON)
    assert "batcher stands aside" in batcher and "mode sync" in batcher
    get = reader(**{"trainer.use_v1": False, "actor_rollout_ref.rollout.router_config_path": "own.yaml"})
    batcher, router = recipe.remarks(get, ON)
    assert "mode legacy" in batcher and "router stands aside" in router
