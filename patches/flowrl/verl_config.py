"""The recipe before anything starts: what FlowRL needs is set, what contradicts it is refused."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator
from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.patches.flowrl import options
from flashpatch.patches.flowrl.param_names import MODE
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.flowrl")

ID = "flowrl.verl.validate_config"
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
USE_KL, KL_COEF = f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"
CLIP_LOW = f"{ACTOR}.clip_ratio_low"
DEFAULTS = {LOSS_MODE: "vanilla", USE_KL: False, KL_COEF: 0.001}
"""verl's own values, which mean that nobody chose one."""

WANTED = {LOSS_MODE: MODE, USE_KL: True, KL_COEF: 0}


def on_validate(original, config: Any, use_reference_policy: bool = False, *args: Any, **kwargs: Any) -> Any:
    """Around ``verl.utils.config.validate_config``, the first thing a trainer's driver does with its recipe.

    Raises:
        PatchError: the recipe or an option contradicts FlowRL; all such settings are named.
    """
    from omegaconf import OmegaConf, open_dict

    engine.require(options.FAMILY)
    ledger.role("driver")
    chosen = options.current()

    def get(path: str, default: Any = None) -> Any:
        return OmegaConf.select(config, path, default=default)

    refused = list(refusals(get, typed()))
    if chosen.weight == "clip" and not 0 <= (get(CLIP_LOW) or 0) < 1:
        refused.append(f"{CLIP_LOW}={get(CLIP_LOW)} (the importance weight's lower bound is 1 minus that)")
    if refused:
        raise PatchError(
            f"cannot train this recipe: {'; '.join(refused)}.",
            patch=ID,
            target=PATCH.targets[0],
            advice="Change these settings, or take flowrl out of FLASHPATCH.",
        )
    with open_dict(config):
        for path, value in WANTED.items():
            if get(path) != value:
                logger.warning("%s=%s, as FlowRL needs", path, value)
                OmegaConf.update(config, path, value, force_add=True)
    return original(config, True, *args, **kwargs)


def refusals(get: Any, typed: Collection[str] = ()) -> Iterator[str]:
    """Settings that contradict FlowRL, each with the reason.

    Args:
        get: ``get(path, default)`` reads the recipe.
        typed: settings that the command line names; verl's default among them was chosen on purpose.
    """
    reasons = {
        LOSS_MODE: f"FLASHPATCH=flowrl means {MODE}",
        USE_KL: "FlowRL weighs against the reference's logprobs, which are computed only with it",
        KL_COEF: "the reference is in FlowRL's loss already; 0 only has its logprobs computed",
    }
    for path, reason in reasons.items():
        value = get(path)
        if value is not None and value != WANTED[path] and (path in typed or value != DEFAULTS[path]):
            yield f"{path}={value} ({reason})"
    if get("algorithm.use_kl_in_reward"):
        yield "algorithm.use_kl_in_reward=True (the reference is in FlowRL's loss already)"
    if get("algorithm.adv_estimator") in (None, "gae"):
        yield "algorithm.adv_estimator=gae (FlowRL needs one reward per response: grpo, for example)"
    if get("algorithm.rollout_correction.bypass_mode"):
        yield "algorithm.rollout_correction.bypass_mode=True (it puts its own loss in the place of FlowRL's)"
    if get("distillation.enabled"):
        yield "distillation.enabled=True (it has a loss of its own)"
    strategy = get(f"{ACTOR}.strategy")
    if strategy not in (None, "fsdp", "fsdp2"):
        yield f"{ACTOR}.strategy={strategy} (fsdp and fsdp2 do)"
    for part in (ACTOR, f"{ACTOR}.fsdp_config"):
        path = f"{part}.ulysses_sequence_parallel_size"
        if get(path, 1) not in (None, 1):
            yield f"{path}={get(path)} (the prompt's hidden states would be spread over ranks)"
        if get(f"{part}.qat.enable"):
            yield f"{part}.qat.enable=True (it would quantize the partition function)"
    for name in ("lora_rank", "lora.rank", "lora_adapter_path"):
        if get(f"{MODEL}.{name}"):
            yield f"{MODEL}.{name}={get(f'{MODEL}.{name}')} (the partition function would be frozen)"
    if get(f"{ACTOR}.use_prefix_grouper"):
        yield f"{ACTOR}.use_prefix_grouper=True (it shares prompts between responses)"


def typed() -> set[str]:
    """Settings named on the command line, if this process is a Hydra application."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return set()
    return {override.partition("=")[0].lstrip("+~") for override in module.HydraConfig.get().overrides.task}


PATCH = Patch(
    id=ID,
    targets=("verl.utils.config:validate_config",),
    requires="verl>=0.9",
    wrapper=on_validate,
    contract=Contract(
        params=("config", "use_reference_policy"),
        mentions=("config.actor_rollout_ref.actor.strategy", "config.actor_rollout_ref.actor.use_kl_loss"),
        exists=(
            "verl.trainer.ppo.utils:need_reference_policy",
            "verl.workers.config.actor:ActorConfig.kl_loss_coef",
            "verl.workers.config.actor:PolicyLossConfig.loss_mode",
            "verl.workers.config.actor:FSDPActorConfig.ulysses_sequence_parallel_size",
        ),
    ),
    evidence="install",
    scope=frozenset({"driver"}),
    tested=("0.9.1",),
    why="FlowRL needs a loss mode, the reference's logprobs and one reward per response; without them it "
    "would fail at the first step, or train something else.",
    how="Before anything starts, sets loss_mode=flowrl and use_kl_loss=True with kl_loss_coef=0 where nobody "
    "chose otherwise, saying so, and refuses what contradicts it, by name.",
    remove_when="never: it says what the family needs.",
)
