"""Take a drafter's training data from verl's pass for old log-probabilities, which computes the states of whole answers
by the policy that gave them, and costs decoding nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.patches._shared.prompt_lengths import prompt_lengths
from flashpatch.patches.eagle.options import UNTIL_VERL
from flashpatch.patches.eagle.verl import verl_config

if TYPE_CHECKING:
    from flashpatch.patches.eagle.capture.pass_samples import PassSamples

logger = logging.getLogger("flashpatch.eagle")

_SAMPLES = "_flashpatch_eagle"  # the actor's engine has its `PassSamples` under this name

patches = Patches(
    "eagle",
    "verl>=0.9",
    scope="trainer",
    evidence="optional",  # the rollout engine may capture instead
    why="A drafter learns from the policy's hidden states, which verl computes in each step and throws away.",
    remove_when=UNTIL_VERL,
)


@patches.wrap(
    "verl.workers.engine_workers:ActorRolloutRefWorker.init_model",
    relies_on=(
        "self.role",
        "self.actor.reset",
        "verl.workers.engine_workers:ActorRolloutRefWorker.compute_log_prob",
    ),
)
def init_model(original, self) -> Any:
    """Hook the actor's model if the job's drafter is trained on its states. Never raises by itself."""
    result = original(self)
    found = verl_config.settings(self.config.rollout) if "actor" in self.role else None
    if found is not None and found["settings"].get("queue"):
        rank, world = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1))
        )
        ledger.role("trainer", rank=rank, world=world)
        try:
            setattr(self.actor.engine, _SAMPLES, _samples(self.actor.engine, found["settings"]))
        except Exception as error:  # a model without a decoder of transformers
            _say_off(error)
    return result


def _samples(actor: Any, settings: Mapping[str, Any]) -> PassSamples:
    from flashpatch.patches.eagle.capture.pass_samples import PassSamples
    from flashpatch.patches.eagle.capture.sample_queue import SampleWriter

    options, writer = engine.options("eagle"), SampleWriter(settings["queue"])
    budget = -(-options["capture_budget"] // actor.get_data_parallel_size())
    return PassSamples(actor.module, settings["kind"], writer, budget, options["capture_window"])


def _say_off(error: Exception) -> None:
    logger.warning("no states of the trainer's pass: %s: %s", type(error).__name__, error)
    ledger.note(eagle_capture_off=f"{type(error).__name__}: {error}")


@patches.wrap(
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.forward_step",
    params=("self", "micro_batch", "loss_function", "forward_only"),
    relies_on=("self.module", "self.prepare_model_inputs"),
)
def forward_step(original, self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
    """Queue the states of a pass without gradient, and note one with it, which trains. Never raises by itself."""
    samples, given = vars(self).get(_SAMPLES), dict(loss_function=loss_function, forward_only=forward_only)
    if samples is None:
        return original(self, micro_batch, **given)
    samples.trained |= not forward_only
    # without its adapters the model is the reference
    if not forward_only or any(
        getattr(one, "disable_adapters", None) is True for one in self.module.modules()
    ):
        return original(self, micro_batch, **given)
    with samples.noting():
        result = original(self, micro_batch, **given)
        try:
            take(samples, micro_batch)
            ledger.note(eagle_capture=dict(samples.counts), eagle_problem=samples.writer.problem)
        except Exception as error:
            _say_off(error)
            delattr(self, _SAMPLES)
    return result


def take(samples: PassSamples, micro_batch: Any) -> None:
    """Queue samples of a micro-batch's forward: whole sequences, of which the tokens that verl trains on were generated."""
    import torch

    ids, trained = micro_batch["input_ids"].unbind(), []
    of_each = zip(ids, prompt_lengths(micro_batch).tolist(), micro_batch["loss_mask"].unbind(), strict=True)
    for tokens, prompt, mask in of_each:
        learn = torch.zeros(len(tokens), dtype=torch.bool)
        learn[prompt:] = mask[: len(tokens) - prompt].bool().cpu()
        trained.append(learn)
    samples.take(ids, trained)
