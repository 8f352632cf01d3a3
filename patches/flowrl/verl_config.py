"""Set what FlowRL needs in verl's configuration, and refuse what contradicts it, before anything starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches._shared.flow_names import MODE
from flashpatch.patches._shared.verl_config import (
    TARGET,
    TRAINER_MODE,
    Get,
    JobConfig,
    door,
    forbidden,
    is_chosen,
    parted_replicas,
    replaced_losses,
    streams,
)
from flashpatch.patches.flowrl import options

ACTOR = "actor_rollout_ref.actor"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
USE_KL, KL_COEF = f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"
CLIP, CLIP_LOW = f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_low"
LORA_ONLY = f"{ACTOR}.checkpoint.save_lora_only"
SAMPLES = "actor_rollout_ref.rollout.n"
DEFAULTS = {LOSS_MODE: "vanilla", USE_KL: False, KL_COEF: 0.001}
"""verl's own values, which do not count as chosen."""

REQUIRED = {LOSS_MODE: MODE, USE_KL: True, KL_COEF: 0}

patches = Patches(
    "flowrl",
    "verl>=0.9",
    scope="driver",
    evidence="install",
    remove_when="never: it states what the family needs.",
)


@patches.wrap(
    TARGET,
    relies_on=(
        "config.actor_rollout_ref.actor.strategy",
        "config.actor_rollout_ref.actor.use_kl_loss",
        "verl.trainer.ppo.utils:need_reference_policy",
        "verl.workers.config.actor:ActorConfig.kl_loss_coef",
        "verl.workers.config.actor:PolicyLossConfig.loss_mode",
    ),
    why="FlowRL needs a loss mode, the reference's logprobs and one reward per response; without them it "
    "would fail at the first step, or train something else.",
)
def validate_config(
    original, config: Any, use_reference_policy: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """Set loss_mode=flowrl and use_kl_loss=True with kl_loss_coef=0 before anything starts, unless the user chose
    otherwise, log that, and refuse contradicting settings by name.

    Raises PatchError if the configuration contradicts FlowRL; all such settings are named."""
    job = JobConfig.open(config, patches.of(validate_config).id)
    chosen = options.current()
    refused = [*options.contradictions(), *refusals(job.get, job.overrides)]
    where = CLIP if job.get(CLIP_LOW) is None else CLIP_LOW
    if chosen.weight == "clip" and not 0 <= (job.get(where) or 0) < 1:
        refused.append(f"{where}={job.get(where)} (the lower bound of the importance weight is 1 minus that)")
    refused += (group_refusals if chosen.log_z == "group" else learned_refusals)(job.get)
    job.refuse(refused, "cannot train with", "Change these settings, or take flowrl out of FLASHPATCH.")
    sampled = {"actor_rollout_ref.rollout.calculate_log_probs": True} if chosen.log_z == "group" else {}
    for path, value in {**REQUIRED, **sampled}.items():
        job.set(path, value, "FlowRL needs it")
    return original(config, True, *args, **kwargs)


door(patches)


def refusals(get: Get, overridden: Collection[str] = ()) -> Iterator[str]:
    """Yield the settings that contradict FlowRL, each with the reason; verl's default counts as chosen if it is among
    ``overridden``, the settings that the command line names."""
    reasons = {
        LOSS_MODE: f"FLASHPATCH=flowrl means {MODE}",
        USE_KL: "FlowRL needs the reference's logprobs, which verl computes only with it",
        KL_COEF: "FlowRL's loss has the reference already; with 0, verl only computes its logprobs",
    }
    for path, reason in reasons.items():
        if get(path) != REQUIRED[path] and is_chosen(get, path, DEFAULTS[path], overridden):
            yield f"{path}={get(path)} ({reason})"
    if get("algorithm.adv_estimator") in (None, "gae"):
        yield "algorithm.adv_estimator=gae (FlowRL needs one reward per response: grpo, for example)"
    yield from parted_replicas(get)
    yield from (replaced := list(replaced_losses(get)))
    if get("distillation.enabled") and not replaced:
        yield "distillation.enabled=True (FlowRL's loss was never run beside another)"
    strategy = get(f"{ACTOR}.strategy")
    if strategy not in (None, "fsdp", "fsdp2"):
        yield f"{ACTOR}.strategy={strategy} (use fsdp or fsdp2)"
    never = dict.fromkeys(
        (f"{ACTOR}.qat.enable", f"{ACTOR}.fsdp_config.qat.enable"), "it quantizes the partition function"
    )
    never["algorithm.use_kl_in_reward"] = "FlowRL's loss has the reference already"
    yield from forbidden(get, never | {f"{ACTOR}.use_prefix_grouper": "it shares prompts between responses"})


def learned_refusals(get: Get) -> Iterator[str]:
    """Yield the settings that lose a learned partition function."""
    yield from forbidden(
        get, {LORA_ONLY: "it leaves the partition function out of checkpoints; its optimizer state stays"}
    )


def group_refusals(get: Get) -> Iterator[str]:
    """Yield the settings that keep ``log_z = "group"`` from seeing whole groups with their reference."""
    number = get(SAMPLES)
    if number is not None and number < 2:
        yield f"{SAMPLES}={number} (log_z = 'group' needs several responses to a prompt)"
    for name, unused in (("top_p", (None, 1)), ("top_k", (None, -1, 0)), ("min_p", (None, 0))):
        if (value := get(f"actor_rollout_ref.rollout.{name}")) not in unused:
            yield f"actor_rollout_ref.rollout.{name}={value} (log_z = 'group' needs samples of the whole policy)"
    if streams(get):
        yield f"{TRAINER_MODE}=stream_async (it computes the reference after log_z = 'group' needs it)"
