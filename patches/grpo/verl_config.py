"""Set the loss mode in verl's configuration if the user chose none, and refuse contradicting settings."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from flashpatch import engine
from flashpatch.patches._shared.verl_config import Get, JobConfig, validate_config_patch
from flashpatch.patches.grpo.loss.policy_loss import MODE
from flashpatch.patches.grpo.streaming import requirements
from flashpatch.record import Contract

logger = logging.getLogger("flashpatch.grpo")

ID = "grpo.verl.validate_config"
ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
ROLLOUT = "actor_rollout_ref.rollout"
REPLAY = f"{ROLLOUT}.enable_rollout_routing_replay"
FIRST_SGLANG = Version("0.5.23")
_DEFAULT = "vanilla"  # verl's; the same whether the user wrote it or not


def on_validate(original, config: Any, *args: Any, **kwargs: Any) -> None:
    """Set the loss mode and refuse contradicting settings, before verl validates its configuration.

    Raises:
        PatchError: settings contradict the family; all are named.
    """
    job = JobConfig.open(config, ID)
    options = engine.options("grpo")
    job.refuse(
        requirements.refusals(job.get),
        f"cannot train in mode {requirements.MODE} with",
        "Change these settings, or choose another trainer.v1.trainer_mode.",
    )
    job.refuse(
        refusals(job.get, options),
        "cannot train with",
        "Change these settings, or switch that part off (grpo's options loss and router).",
    )
    for path, value, reason in adaptations(job.get, options):
        job.set(path, value, reason)
    for sentence in remarks(job.get, options):
        logger.warning("%s", sentence)
    found = original(config, *args, **kwargs)
    if requirements.asked(job.get):  # after all families have chosen the loss
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        job.refuse(
            requirements.loss_refusals(job.get, POLICY_LOSS_REGISTRY),
            f"cannot train in mode {requirements.MODE} with",
            "Change these settings, or choose another trainer.v1.trainer_mode.",
        )
    return found


def refusals(get: Get, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that contradict the family, each with the reason."""
    if requirements.asked(get) and get(REPLAY):
        yield f"{REPLAY}=True ({requirements.MODE} trains in rounds of its own, which replay no experts)"
    if get(REPLAY) and get(f"{ROLLOUT}.name") == "sglang" and Version(version("sglang")) < FIRST_SGLANG:
        yield f"{REPLAY}=True (SGLang {version('sglang')}; its record of experts was found true from {FIRST_SGLANG} on)"
    mode = get(LOSS, _DEFAULT)
    if not options["loss"]:
        if mode == MODE:
            yield f"{LOSS}={mode} (grpo's option loss is off, which leaves this mode out)"
        return
    if mode not in (None, _DEFAULT, MODE):
        yield f"{LOSS}={mode} (grpo sets {MODE}; choose one of the two)"
    if get("algorithm.rollout_correction.bypass_mode"):
        yield "algorithm.rollout_correction.bypass_mode=True (it replaces grpo's loss)"


def adaptations(get: Get, options: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the settings to make, each with its value and the reason."""
    if not options["loss"] and not requirements.asked(get):
        return
    if options["loss"] and get(LOSS) != MODE:
        yield LOSS, MODE, "the loss divides by the samples of the batch, not by its padding"
    norm = get(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm"
    if norm and get(f"{ACTOR}.loss_scale_factor") is None:
        width = get("data.max_response_length")
        yield (
            f"{ACTOR}.loss_scale_factor",
            width,
            "verl would divide by a micro-batch's width, which depends on the split",
        )


def remarks(get: Get, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each part of the family that this configuration does not use."""
    mode = get("trainer.v1.trainer_mode", "sync") if get("trainer.use_v1", True) else "legacy"
    if not requirements.asked(get):
        yield (
            f"the streaming batcher is not used: in trainer mode {mode} verl has the whole batch before it "
            f"divides it, and balances it by Karmarkar and Karp; trainer mode {requirements.MODE} uses it"
        )
    if options["router"] and get("actor_rollout_ref.rollout.router_config_path"):
        yield "the token router is not used: the configuration has a router_config_path"


PATCH = validate_config_patch(
    id=ID,
    requires="verl>=0.9",
    wrapper=on_validate,
    contract=Contract(
        params=("config",),
        exists=(
            "verl.workers.config.actor:PolicyLossConfig.loss_mode",
            "verl.workers.config.actor:ActorConfig.loss_scale_factor",
        ),
    ),
    evidence="install",
    needs=("grpo.verl.register_policy_loss",),
    why="verl uses a registered loss only if the configuration names it.",
    how="Before anything starts, sets the loss mode if the configuration has verl's default, sets a "
    "constant divisor if verl would take a micro-batch's width, and refuses another loss mode.",
    remove_when="never: it states what the family changes in a configuration.",
)
