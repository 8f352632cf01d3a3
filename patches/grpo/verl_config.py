"""Set the loss mode in verl's configuration if the user chose none, and refuse contradicting settings."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.patches._shared.verl_config import (
    STREAM,
    TARGET,
    TRAINER_MODE,
    Get,
    JobConfig,
    door,
    forbidden,
    parted_replicas,
    replaced_losses,
    streams,
)
from flashpatch.patches.grpo.loss.policy_loss import MODE
from flashpatch.patches.grpo.streaming import divisor

logger = logging.getLogger("flashpatch.grpo")

ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
ROLLOUT = "actor_rollout_ref.rollout"
ADAPTERS = ("lora_rank", "lora.rank", "lora_adapter_path")
REPLAY = f"{ROLLOUT}.enable_rollout_routing_replay"
FIRST_SGLANG = Version("0.5.23")
_DEFAULT = "vanilla"  # verl's; the same whether the user wrote it or not
_ADVICE = "Change these settings, or choose another trainer.v1.trainer_mode."
_IN_THAT_MODE = f"cannot train in mode {STREAM} with", _ADVICE
GROUP_LOCAL = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo")
"""Advantage estimators that need a sample's own group and no other, with which groups can be trained on as they end."""


patches = Patches("grpo", "verl>=0.9", scope="driver", evidence="install")


@patches.wrap(
    TARGET,
    relies_on=(
        "verl.workers.config.actor:PolicyLossConfig.loss_mode",
        "verl.workers.config.actor:ActorConfig.loss_scale_factor",
    ),
    why="verl uses a registered loss only if the configuration names it.",
    remove_when="never: it states what the family changes in a configuration.",
)
def validate_config(original, config: Any, *args: Any, **kwargs: Any) -> None:
    """Set the loss mode, before anything starts, if the configuration has verl's default, set a constant divisor if verl
    would take a micro-batch's width, and refuse another loss mode.

    Raises PatchError if settings contradict the family; all are named."""
    job = JobConfig.open(config, patches.of(validate_config).id)
    options = engine.options("grpo")
    job.refuse(stream_refusals(job.get), *_IN_THAT_MODE)
    job.refuse(
        refusals(job.get, options),
        "cannot train with",
        "Change these settings, or switch that part off (grpo's options loss and router).",
    )
    for change in adaptations(job.get, options):
        job.set(*change)
    for sentence in remarks(job.get, options):
        logger.warning("%s", sentence)
    found = original(config, *args, **kwargs)
    if streams(job.get):  # after all families have chosen the loss
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        def of_actor(path: str, default: Any = None) -> Any:
            return job.get(f"{ACTOR}.{path}", default)

        # None of a loss that this process does not know
        why = divisor.problem(of_actor, POLICY_LOSS_REGISTRY)
        job.refuse([] if why is None else [f"{ACTOR}.{why}"], *_IN_THAT_MODE)
    return found


door(patches)


def refusals(get: Get, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that contradict the family, each with the reason."""
    if streams(get) and get(REPLAY):
        yield f"{REPLAY}=True ({STREAM} trains in rounds of its own, which replay no experts)"
    if get(REPLAY) and get(f"{ROLLOUT}.name") == "sglang" and Version(version("sglang")) < FIRST_SGLANG:
        yield f"{REPLAY}=True (SGLang {version('sglang')}; its record of experts was found true from {FIRST_SGLANG} on)"
    yield from parted_replicas(get)
    mode = get(LOSS, _DEFAULT)
    if not options["loss"]:
        if mode == MODE:
            yield f"{LOSS}={mode} (grpo's option loss is off, which leaves this mode out)"
        return
    if mode not in (None, _DEFAULT, MODE):
        yield f"{LOSS}={mode} (grpo sets {MODE}; choose one of the two)"
    yield from replaced_losses(get)
    if (dual := get(f"{ACTOR}.clip_ratio_c")) is not None and dual <= 1:
        yield f"{ACTOR}.clip_ratio_c={dual} (it must be above 1: negative answers would get no gradient)"


def adaptations(get: Get, options: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the settings to make, each with its value and the reason."""
    if not options["loss"] and not streams(get):
        return
    if options["loss"] and get(LOSS) != MODE:
        yield LOSS, MODE, "the loss divides by the samples of the batch, not by its padding"
    norm = get(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-sum-norm"
    if norm and get(f"{ACTOR}.loss_scale_factor") is None:
        yield (
            f"{ACTOR}.loss_scale_factor",
            get("data.max_response_length"),
            "verl would divide by a micro-batch's width, which depends on the split",
        )


def remarks(get: Get, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each part of the family that this configuration does not use."""
    mode = _trainer_mode(get)
    if not streams(get):
        yield (
            f"the streaming batcher is not used: in trainer mode {mode} verl has the whole batch before it "
            f"divides it, and balances it by Karmarkar and Karp; trainer mode {STREAM} uses it"
        )
        for name in ("reference_every", "max_staleness"):
            if options[name]:
                yield f"grpo's option {name} does nothing in trainer mode {mode}: {STREAM} uses it"
    elif options["reference_every"] and not get(f"{ACTOR}.use_kl_loss"):
        yield f"grpo's option reference_every does nothing: without {ACTOR}.use_kl_loss there is no reference"
    if options["router"] and get(f"{ROLLOUT}.router_config_path"):
        yield "the token router is not used: the configuration has a router_config_path"


def _trainer_mode(get: Get) -> str:
    return get(TRAINER_MODE, "sync") if get("trainer.use_v1", True) else "legacy"


def stream_refusals(get: Get) -> Iterator[str]:
    """Yield the settings that contradict the mode `STREAM`, each with the reason; none for other modes."""
    if streams(get):
        yield from _whole_batch(get)
        yield from _places(get)


_UNASKED, _ABSENT = "groups are taken as they end, so that nothing asks it", "not supported here"
_REFUSED = {
    "trainer.v1.sampler.custom_sampler.name": _UNASKED,
    f"{ROLLOUT}.agent.agent_loop_manager_class": _UNASKED,
    "skip.rollout_tq.enable": _UNASKED,
    "trainer.v1.separate_async.hybrid_rollout.enable_switch": _UNASKED,
    f"{ROLLOUT}.full_determinism": "groups are trained on in the order in which they end",
    f"trainer.v1.{STREAM}": "settings of this mode are those of separate_async: trainer.v1.separate_async.num_warmup_batches",
    "critic.enable": "values need the whole batch",
    "trainer.critic_warmup": "there is no critic",
    "algorithm.use_kl_in_reward": "use actor.use_kl_loss",
    "algorithm.rollout_correction.rollout_is_batch_normalize": "a mean over the whole batch",
    **{f"actor_rollout_ref.model.{name}": _ABSENT for name in (*ADAPTERS, "mtp.enable_train")},
    f"{ROLLOUT}.disaggregation.enabled": _ABSENT,
    "distillation.enabled": _ABSENT,
}
"""Settings that the mode `STREAM` cannot train with, each with the reason."""


def _whole_batch(get: Get) -> Iterator[str]:
    """Yield what needs the whole batch before its first gradient, or another loss."""
    yield from replaced_losses(get)
    estimator = get("algorithm.adv_estimator", "gae")
    if estimator not in GROUP_LOCAL:
        yield f"algorithm.adv_estimator={estimator} (advantages need the whole batch; use {', '.join(GROUP_LOCAL)})"
    yield from forbidden(get, _REFUSED)
    if estimator == "opo" and get("algorithm.rollout_correction.rollout_rs"):
        yield (
            f"algorithm.adv_estimator=opo with rollout_rs={get('algorithm.rollout_correction.rollout_rs')} (its baseline weighs "
            "responses by the tokens that rejection leaves, known after the forward alone; use grpo or rloo, or no rollout_rs)"
        )
    epochs, batch = get(f"{ACTOR}.ppo_epochs", 1), get("data.train_batch_size")
    mini = get(f"{ACTOR}.ppo_mini_batch_size")
    if epochs != 1:
        yield f"{ACTOR}.ppo_epochs={epochs} (each group is trained on once, as it comes; use 1)"
    if mini != batch:
        yield f"{ACTOR}.ppo_mini_batch_size={mini} (one optimizer step per version; use data.train_batch_size, {batch})"


def _places(get: Get) -> Iterator[str]:
    """Yield settings that place trainer and rollout on the wrong devices, or train what the mode cannot."""
    for path in (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"):
        if not get(path):
            yield f"{path}={get(path)} (rollouts need devices of their own)"
    engine_path = f"{ROLLOUT}.checkpoint_engine.backend"
    if get(engine_path, "naive") in (None, "naive") and not engine.enabled("cpu"):
        yield f"{engine_path}=naive (it cannot reach another process; use nccl, nixl or mooncake)"
    strategy = get(f"{ACTOR}.strategy")
    if strategy not in (None, "fsdp", "fsdp2"):
        yield f"{ACTOR}.strategy={strategy} (use fsdp or fsdp2)"
    if get("reward.reward_model.enable") and not get("reward.reward_model.enable_resource_pool"):
        yield "reward.reward_model.enable_resource_pool=False (rollouts never pause for it; use True)"
