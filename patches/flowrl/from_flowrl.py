"""Take over the settings of FlowRL's published code, its verl fork and its recipe for verl."""

from __future__ import annotations

from flashpatch.migration.given import Given
from flashpatch.migration.plan import Plan, is_on
from flashpatch.patches._shared import verl_moved
from flashpatch.patches.flowrl.options import OPTIONS
from flashpatch.patches.flowrl.published import LAYERS, LOSS_KIND

HELP = "FlowRL: Xuekai-Zhu/FlowRL, and recipe/flowrl of verl"

ACTOR = "actor_rollout_ref.actor"
BETA = "algorithm.tb_coef"
VARIANT = "FLOWRL_LOSS_VARIANT"
CAPS = (f"{ACTOR}.tis_imp_ratio_cap", f"{ACTOR}.imp_ratio_cap")
MANAGER = "reward_model.reward_manager"
PUBLISHED_KIND = "tempered_important_sampling"
FORK_MANAGERS = {"naive_code", "prime_code"}
"""Reward managers of the fork that stock verl does not register."""

VARIANTS = {
    "vanilla": {"weight": "raw"},
    "flowrl_clip": {"weight": "clip"},
    "flowrl_clip_tis": {"weight": "raw", "weight_cap": 10.0},
}
"""Loss variants of the recipe: the options that compute them."""


def migrate(given: Given, plan: Plan) -> None:
    """Fill the plan from what was given."""
    plan.enable("flowrl")
    if not {LAYERS, LOSS_KIND, BETA} & given.overrides.keys() and VARIANT not in given.variables:
        plan.lose("FlowRL's settings", "none was found; what follows is the loss of its published scripts")
    layers = _layers(given, plan)
    beta = _beta(given, plan)
    variant = given.variables.get(VARIANT)
    if variant is not None:
        _variant(given, plan)
    elif layers == 3 and beta == OPTIONS["beta"].default and _kind(given, plan):
        plan.option("flowrl", "paper", True)
        plan.do_otherwise(
            "the published code's importance weight",
            "it computes the clipped weight and multiplies by the other; paper = true clips, as the paper says. "
            'For that code to the letter write weight = "raw" and dropout = 0.1 in place of paper',
        )
        layers = beta = None
    if layers is not None:
        plan.option("flowrl", "num_layers", layers, given.overrides.get(LAYERS, ""))
    if beta is not None and beta != OPTIONS["beta"].default:
        plan.option("flowrl", "beta", beta, given.overrides.get(BETA, ""))
        plan.do_otherwise(
            given.overrides.get(BETA, BETA), "beta in [flowrl]; the recipe's code has 15 whatever is set"
        )
    _reference(given, plan)
    sequences = variant is not None and variant.value == "flowrl_clip_tis"
    verl_moved.rollout_correction(given, plan, CAPS, "sequence" if sequences else "token")
    manager = given.overrides.get(MANAGER)
    if manager is not None and manager.value in FORK_MANAGERS:
        plan.take_out(manager)
        plan.lose(
            manager, "a reward manager of the fork; give its function as reward.custom_reward_function.path"
        )
    verl_moved.apply(given, plan)


def _layers(given: Given, plan: Plan) -> int | None:
    found = given.overrides.get(LAYERS)
    if found is None:
        return None if VARIANT in given.variables else 3
    plan.take_out(found)
    return plan.number(found, int)


def _beta(given: Given, plan: Plan) -> float | None:
    found = given.overrides.get(BETA)
    if found is None:
        return OPTIONS["beta"].default
    plan.take_out(found)
    return plan.number(found, float)


def _kind(given: Given, plan: Plan) -> bool:
    """Whether the published loss is asked for; another one is lost."""
    found = given.overrides.get(LOSS_KIND)
    if found is None:
        return True
    plan.take_out(found)
    if found.value != PUBLISHED_KIND:
        plan.lose(found, f"only {PUBLISHED_KIND} is known; see length and weight in [flowrl]")
    return found.value == PUBLISHED_KIND


def _variant(given: Given, plan: Plan) -> None:
    setting = given.variables[VARIANT]
    chosen = VARIANTS.get(setting.value)
    if chosen is None:
        plan.lose(setting, f"of the recipe's losses {', '.join(VARIANTS)} have options here")
        return
    for name, value in chosen.items():
        plan.option("flowrl", name, value, setting)
    if setting.value == "flowrl_clip":
        plan.set_verl(f"{ACTOR}.clip_ratio_low", 0.2, "the recipe's loss has these bounds in its code")
        plan.set_verl(f"{ACTOR}.clip_ratio_high", 0.28, "the recipe's loss has these bounds in its code")


def _reference(given: Given, plan: Plan) -> None:
    """Set what FlowRL refuses otherwise: the reference is in its loss already."""
    coefficient = given.overrides.get(f"{ACTOR}.kl_loss_coef")
    if coefficient is not None and plan.number(coefficient, float) not in (0, None):
        plan.set_verl(f"{ACTOR}.kl_loss_coef", 0, "the published code drops verl's loss, and this KL with it")
    used = given.overrides.get(f"{ACTOR}.use_kl_loss")
    if used is not None and not is_on(used):
        plan.set_verl(f"{ACTOR}.use_kl_loss", True, "FlowRL needs the reference's logprobs")
    rewarded = given.overrides.get("algorithm.use_kl_in_reward")
    if is_on(rewarded):
        plan.take_out(rewarded)
        plan.lose(rewarded, "FlowRL's loss has the reference already")
    if "algorithm.adv_estimator" not in given.overrides:
        plan.set_verl("algorithm.adv_estimator", "grpo", "one reward per response")
