"""Tell where settings of verl's older versions, on which the research forks are built, are in verl 0.9."""

from __future__ import annotations

from flashpatch.migration.given import Given
from flashpatch.migration.plan import Plan

MOVED = {
    "critic.model.fsdp_config.": "critic.fsdp.",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": (
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    ),
    "reward_model.overlong_buffer.": "+reward.reward_kwargs.overlong_buffer_cfg.",
}
"""Old path to new path; what ends in a dot stands for all settings below it."""

GONE = {
    "actor_rollout_ref.rollout.mode": "rollouts are always asynchronous servers",
    "reward_model.launch_reward_fn_async": "rewards are always computed by workers of their own",
}
"""Old path to the reason why there is none any more."""

LEGACY_NAMES = {"verl.trainer.main_fastrl", "recipe.flowrl.main_flowrl", "recipe.dapo.main_dapo"}
"""Programs that are verl's ``verl.trainer.main_ppo`` here."""


ENGINE = "actor_rollout_ref.rollout.name"


def apply(given: Given, plan: Plan, engine: str = "vllm") -> None:
    """Move or take out what verl 0.9 has elsewhere or no more; name the rollout engine where nobody does.

    Args:
        engine: the fork's own default of it.
    """
    if ENGINE not in given.overrides and any(
        name.startswith("actor_rollout_ref.") for name in given.overrides
    ):
        plan.set_verl(ENGINE, engine, "verl 0.9 has no default")
    for name, setting in given.overrides.items():
        if name in plan.taken_out:
            continue
        if name in GONE and not (name.endswith(".mode") and setting.value == "async"):
            plan.take_out(setting)
            plan.do_otherwise(setting, f"{GONE[name]} in verl 0.9")
        for old, new in MOVED.items():
            if name == old or (old.endswith(".") and name.startswith(old)):
                plan.take_out(setting)
                plan.set_verl(
                    new + name.removeprefix(old) if old.endswith(".") else new, setting.value, f"was {name}"
                )
                if old == "reward_model.overlong_buffer.":
                    plan.set_verl(
                        "+reward.reward_kwargs.max_resp_len",
                        "${data.max_response_length}",
                        "it needs this now",
                    )
    for call in given.calls:
        if call.program in LEGACY_NAMES:
            plan.do_otherwise(f"python -m {call.program}", "python -m verl.trainer.main_ppo")


def rollout_correction(given: Given, plan: Plan, names: tuple[str, ...], kind: str = "token") -> bool | None:
    """Turn a cap of importance weights into verl's rollout correction.

    Args:
        names: what the cap was called; the first that is set counts, a value of 0 or below means none.
        kind: ``token`` or ``sequence``.

    Returns:
        Whether there is a correction; None where no cap was set.
    """
    found = next((given.overrides[name] for name in names if name in given.overrides), None)
    if found is None:
        return None
    plan.take_out(found)
    cap = plan.number(found, float)
    if cap is None:
        return None
    if cap > 0:
        plan.set_verl("algorithm.rollout_correction.rollout_is", kind, f"was {found.name}")
        plan.set_verl("algorithm.rollout_correction.rollout_is_threshold", cap, f"was {found.name}")
    return cap > 0
