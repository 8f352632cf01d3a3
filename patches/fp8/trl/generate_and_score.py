"""Measure the mismatch of the rollouts that TRL's GRPO trains on, and let the trainer log it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.patches.fp8.mismatch.gap import CAP
from flashpatch.patches.fp8.mismatch.monitor import MONITOR, Batch, observe
from flashpatch.patches.fp8.rollout_numbers import NUMBERS
from flashpatch.patches.fp8.trl.sync_weights import STEP
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("flashpatch.fp8")

_LEAST = 0.8
"""Mean weight that TRL's importance ratios leave a batch, below which a warning says so."""


def on_generate_and_score(original, self, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Around ``GRPOTrainer._generate_and_score_completions``: measure a batch that is trained on."""
    token = STEP.set(self.state.global_step)
    try:
        batch = original(self, *args, **kwargs)
        if self.model.training and self.use_vllm:
            _add_callback(self)
            NUMBERS.add(_measured(self, batch, engine.options("fp8")["mismatch_jump"]))
    finally:
        STEP.reset(token)
    return batch


def _add_callback(trainer: Any) -> None:
    from flashpatch.patches.fp8.transformers import RolloutMetrics

    RolloutMetrics().add_to(trainer)


def _measured(trainer: Any, batch: dict[str, Any], jump: float) -> dict[str, float]:
    """Return ``mismatch/*`` of this rank's samples; empty if TRL has not computed the trainer's logprobs."""
    rollout, own = batch.get("sampling_per_token_logps"), batch.get("old_per_token_logps")
    if rollout is None or own is None:
        return {}
    mask = batch["completion_mask"] * batch.get("tool_mask", 1) * ~rollout.isnan()
    truncated = trainer.top_p < 1 or trainer.top_k > 0 or (trainer.min_p or 0) > 0
    cap = trainer.vllm_importance_sampling_clip_max or CAP
    found = observe(
        MONITOR,
        rollout.nan_to_num(),
        own,
        mask,
        Batch(cap=cap, truncated=truncated),
        jump,
    )
    ratio = batch.get("importance_sampling_ratio")
    return found if ratio is None else {**found, **_weights(trainer, ratio, mask)}


def _weights(trainer: Any, ratio: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Measure what TRL's importance ratios leave of a batch; warn once if that is little.

    Args:
        ratio: [samples, 1] or [samples, tokens], what TRL multiplies the loss with.
        mask: [samples, tokens], 1 for tokens that count.
    """
    used = ratio.flatten() if ratio.shape[1] == 1 else ratio[mask.bool()]
    if not used.numel():
        return {}
    mean, dropped = float(used.mean()), float((used == 0).double().mean())
    if mean < _LEAST and not ledger.notes().get("little_weight"):
        ledger.note(little_weight={"step": STEP.get(), "mean": mean, "dropped": dropped})
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


PATCH = Patch(
    id="fp8.trl.generate_and_score_completions",
    targets=("trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions",),
    requires="trl>=1.16",
    wrapper=on_generate_and_score,
    contract=Contract(
        params=("inputs",),
        mentions=(
            "sampling_per_token_logps",
            "old_per_token_logps",
            "completion_mask",
            "vllm_importance_sampling_ratio",
            "self.vllm_importance_sampling_clip_max",
            "self.vllm_importance_sampling_mode",
            "self.use_vllm",
        ),
    ),
    evidence="optional",
    scope=frozenset({"trainer"}),
    needs=("fp8.trl.sync_weights",),
    why="TRL logs the largest and mean difference of logprobs, which grow with length and precision alike; it says "
    "neither which sync made rollouts drift nor how little of a batch its importance ratios leave.",
    how="Adds mismatch/* to what the trainer logs, warns of an update after which k3 jumps, and of ratios that leave "
    "little.",
    upstream="TRL logs sampling/sampling_logp_difference and sampling/importance_sampling_ratio.",
    remove_when="TRL compares its syncs, and warns of ratios that drop much of a batch.",
)
