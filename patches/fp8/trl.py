"""End TRL's weight sync with a commit, and measure the mismatch of the rollouts that its GRPO trains on.

After a sync the colocated engine holds one new policy, or the sync raises."""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.context import holding
from flashpatch.patches.fp8 import model_registry, stated
from flashpatch.patches.fp8.mismatch.monitor import CAP, Batch, observe
from flashpatch.patches.fp8.rollout_numbers import NUMBERS

if TYPE_CHECKING:
    import torch

    from flashpatch.patches.fp8.update.model import ManagedModel

logger = logging.getLogger("flashpatch.fp8")

_STEP: ContextVar[int | None] = ContextVar("step", default=None)
"""The step of the trainer that generates now, if that is known."""
_LEAST = 0.8
"""Mean weight that TRL's importance ratios leave a batch, below which a warning says so."""

patches = Patches("fp8", "trl>=1.16", scope="trainer")


@patches.wrap(
    "trl.generation.vllm_generation:VLLMGeneration.sync_weights",
    relies_on=(
        "self.mode",
        "self.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights",
        "self.llm.reset_prefix_cache",
        "trl.generation.vllm_generation:VLLMGeneration._iter_named_params",
    ),
    needs="fp8.vllm.initialize_model",
    evidence="update",
    when="called=fp8.trl.generate_and_score_completions",
    why="TRL calls load_weights once per parameter and never says that it is done, so a sync that left a parameter out "
    "returns, and the next batch is what fails.",
    upstream="huggingface/trl#7085 takes a colocated fp8 engine through vLLM's reload, open; #3399.",
    remove_when="TRL's colocated sync begins and ends an update of vLLM's.",
)
def sync_weights(original, self, *args: Any, **kwargs: Any) -> Any:
    """Commit when the sync ends, and raise with the names of what did not come; time the sync."""
    models, began = _models(self), time.perf_counter()
    try:
        with stated.ending(models, "TRL"):
            result = original(self, *args, **kwargs)
    except PatchError as error:
        ledger.event("error", what="weight sync", step=_STEP.get(), problem=error.problem)
        raise PatchError(
            f"the weights that TRL sent are not one whole policy: {error.problem}",
            patch=patches.of(sync_weights).id,
            advice="The trainer's parameters and the engine's model must be of one kind.",
        ) from error
    _record(models, time.perf_counter() - began)
    return result


@patches.wrap(
    "trl.generation.vllm_generation:VLLMGeneration._iter_named_params",
    needs="fp8.trl.sync_weights",
    evidence="update",
    when="called=fp8.trl.sync_weights",
    why="The first parameter begins the update: before it TRL may have to wake the engine.",
    remove_when="TRL's colocated sync begins and ends an update of vLLM's.",
)
def iter_named_params(original, self):
    """Begin an update of the colocated engine before the first parameter."""
    stated.begin(_models(self), "TRL")
    yield from original(self)


def _models(generation: Any) -> list[ManagedModel]:
    """Return the policies of the engine in this process; none if TRL sends to a server."""
    if generation.mode != "colocate":
        return []
    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    return [model for model in model_registry.all_models(runner) if model.adapter.role == "target"]


def _record(models: list[ManagedModel], seconds: float) -> None:
    numbers = {"timing_s/sync/total": seconds}
    if models:
        numbers["sync/policy_version"] = float(max(model.version for model in models))
    step = _STEP.get()
    NUMBERS.add(numbers)
    ledger.role("trainer")
    ledger.note(sync_step=step, sync={name: round(value, 4) for name, value in numbers.items()})
    ledger.event("sync", step=step, **{name: round(value, 6) for name, value in numbers.items()})


@patches.wrap(
    "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions",
    relies_on=(
        "sampling_per_token_logps",
        "old_per_token_logps",
        "completion_mask",
        "vllm_importance_sampling_ratio",
        "self.vllm_importance_sampling_clip_max",
        "self.vllm_importance_sampling_mode",
        "self.use_vllm",
    ),
    params="inputs",
    evidence="optional",
    why="TRL logs the largest and mean difference of logprobs, which grow with length and precision alike; it says "
    "neither which sync made rollouts drift nor how little of a batch its importance ratios leave.",
    upstream="TRL logs sampling/sampling_logp_difference and sampling/importance_sampling_ratio.",
    remove_when="TRL compares its syncs, and warns of ratios that drop much of a batch.",
)
def generate_and_score_completions(original, self, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Add mismatch/* to what the trainer logs, and warn of ratios that leave little."""
    with holding(_STEP, self.state.global_step):
        batch = original(self, *args, **kwargs)
        if self.model.training and self.use_vllm:
            from flashpatch.patches.fp8.transformers import RolloutMetrics

            RolloutMetrics().add_to(self)
            NUMBERS.add(_measured(self, batch))
    return batch


def _measured(trainer: Any, batch: dict[str, Any]) -> dict[str, float]:
    """Return ``mismatch/*`` of this rank's samples; empty if TRL has not computed the trainer's logprobs."""
    rollout, own = batch.get("sampling_per_token_logps"), batch.get("old_per_token_logps")
    if rollout is None or own is None:
        return {}
    mask = batch["completion_mask"] * batch.get("tool_mask", 1) * ~rollout.isnan()
    truncated = trainer.top_p < 1 or trainer.top_k > 0 or (trainer.min_p or 0) > 0
    cap = trainer.vllm_importance_sampling_clip_max or CAP
    found = observe(rollout.nan_to_num(), own, mask, Batch(cap=cap, truncated=truncated))
    ratio = batch.get("importance_sampling_ratio")
    return found if ratio is None else {**found, **_weights(trainer, ratio, mask)}


def _weights(trainer: Any, ratio: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Measure what TRL's importance ratios leave of a batch; warn once if that is little.

    Args:
        ratio: [samples, 1] or [samples, tokens], what TRL multiplies the loss with.
        mask: [samples, tokens], 1 for tokens that count."""
    used = ratio.flatten() if ratio.shape[1] == 1 else ratio[mask.bool()]
    if not used.numel():
        return {}
    mean, dropped = float(used.mean()), float((used == 0).double().mean())
    if mean < _LEAST and not ledger.notes().get("little_weight"):
        ledger.note(little_weight={"step": _STEP.get(), "mean": mean, "dropped": dropped})
        logger.warning(
            "TRL's importance ratios (%s) leave rollouts %.2f of their weight, and drop %.0f%% of %s: the trainer learns "
            "that much less from them. Ratios of whole sequences shrink and scatter with length; "
            "vllm_importance_sampling_mode='token_truncate' takes them token by token.",
            trainer.vllm_importance_sampling_mode,
            mean,
            100 * dropped,
            "sequences" if ratio.shape[1] == 1 else "tokens",
        )
    return {"mismatch/weight_mean": mean, "mismatch/weight_dropped": dropped}
