"""A loss says what it divides by, or is refused with the way out."""

import pytest

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.streaming import divisor

OF_VERL = {"__module__": divisor.ALGOS}


def loss(**attributes):
    def function():
        """Stand for a registered loss."""

    for name, value in attributes.items():
        setattr(function, name, value)
    return function


def problem(mode="mine", function=None, **settings):
    given = {"policy_loss.loss_mode": mode, **settings}
    return divisor.problem(
        lambda path, default=None: given.get(path, default), {mode: function or loss(**OF_VERL)}
    )


def test_a_loss_that_follows_the_aggregation_may_have_other_terms_and_any_terms_of_weight_0():
    assert problem("vanilla", entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.1) is None
    assert problem("sapo", entropy_coeff=0, use_kl_loss=False, kl_loss_coef=0.2) is None
    assert problem("sapo", use_kl_loss=True, kl_loss_coef=0) is None


def test_a_loss_without_declaration_is_refused_with_what_to_write():
    why = problem(function=loss())
    assert "policy_loss.loss_mode=mine" in why and "divides_by" in why
    assert "divides_by" in problem("vanilla", function=loss())  # a user's, under verl's name
    assert "divides_by" in problem("brand_new_of_verl")
    assert problem(function=loss(divides_by="samples")) is None
    assert "'groups'" in problem(function=loss(divides_by="groups"))


@pytest.mark.parametrize("mode", ["bypass_mode", "clip_cov", "geo_mean", "kl_cov"])
def test_what_a_split_changes_is_refused(mode):
    assert f"policy_loss.loss_mode={mode}" in problem(mode)


@pytest.mark.parametrize("settings", [dict(entropy_coeff=0.1), dict(use_kl_loss=True, kl_loss_coef=0.1)])
def test_terms_that_divide_by_something_else_than_the_loss_are_refused(settings):
    why = problem("sapo", **settings)
    assert (
        f"{[*settings][-1]}=0.1" in why and "loss_agg_mode=token-mean" in why and "divides by samples" in why
    )
    assert problem("sapo", loss_agg_mode="seq-mean-token-sum", **settings) is None


def test_the_width_of_a_round_is_no_divisor():
    assert "loss_scale_factor" in problem("vanilla", loss_agg_mode="seq-mean-token-sum-norm")
    assert problem("vanilla", loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=512) is None


def test_a_loss_that_the_driver_does_not_know_is_judged_by_the_trainer():
    actor = {"policy_loss": {"loss_mode": "mine"}, "loss_agg_mode": "token-mean"}
    assert (
        divisor.problem(lambda path, default=None: {"policy_loss.loss_mode": "mine"}.get(path, default), {})
        is None
    )
    with pytest.raises(PatchError, match="no loss is registered under this name"):
        divisor.of_actor(actor, {})
    found = divisor.of_actor(actor, {"mine": loss(divides_by="samples", metrics_divide_by={"a": "tokens"})})
    assert (found.loss, found.terms) == ("samples", "tokens")
    names = "a", "actor/pg_loss", "kl_loss"
    assert [*map(found.of_metric, names)] == ["tokens", "samples", "tokens"]
