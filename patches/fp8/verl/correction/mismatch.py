"""Measure the gap between the rollout's policy and the trainer's after each update.

verl has both logprobs of every token when it computes its own debug metrics. There the gap is measured, per
precision in a mixed fleet, and compared with that of earlier updates: an update after which it jumps is
reported, with the layers whose rounding error grew most.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.patches.fp8.mismatch.monitor import MONITOR, Batch, observe
from flashpatch.patches.fp8.verl.correction import truncated_sampling
from flashpatch.patches.fp8.verl.correction.rollout_correction import CAP
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    from flashpatch.patches._shared.verl_config import Get

KEY = "rollout_precision"
"""Key of a sample's precision among verl's extra fields."""

BATCH: ContextVar[Batch] = ContextVar("batch", default=Batch())


def on_debug_metrics(original, data: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Around ``calculate_debug_metrics``, whose ``data`` has both logprobs."""
    found = original(data, *args, **kwargs)
    rollout, trainer = data.batch["rollout_log_probs"], data.batch["old_log_probs"]
    mask = data.batch["response_mask"] if "response_mask" in data.batch else data.batch["attention_mask"]
    mask = mask[:, -rollout.shape[1] :]
    batch = BATCH.get()
    # The older trainer keeps extra fields in the batch, and its process has checked the configuration.
    if batch.precisions is None and KEY in data.non_tensor_batch:
        named = [name or "" for name in data.non_tensor_batch[KEY].tolist()]
        batch = replace(batch, precisions=named)
    if ledger.notes().get(truncated_sampling.NOTE, {}).get("measurable"):
        batch = replace(batch, truncated=True)
    factor = engine.options("fp8")["mismatch_jump"]
    return {**found, **observe(MONITOR, rollout, trainer, mask, batch, factor)}


def on_old_log_prob(original, self, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the trainer's ``_compute_old_log_prob``: look up the precision of each sample of this batch."""
    truncated = truncated_sampling.is_measurable(_reader(self.config), engine.options("fp8")["support"])
    token = BATCH.set(Batch(_cap(self.config), _precisions(batch), truncated))
    try:
        return original(self, batch, *args, **kwargs)
    finally:
        BATCH.reset(token)


def _reader(config: Any) -> Get:
    from omegaconf import OmegaConf

    return lambda path, default=None: OmegaConf.select(config, path, default=default)


def _cap(config: Any) -> float:
    """Return the upper bound of importance weights in the config; verl's default if it has none."""
    written = _reader(config)("algorithm.rollout_correction.rollout_is_threshold")
    try:
        return float(str(written).rpartition("_")[2])
    except ValueError:
        return CAP


def _precisions(batch: Any) -> list[str | None] | None:
    """Return the precision per sample of a mixed fleet, in the order of the transfer queue's keys."""
    if len(engine.options("fp8")["fleet"]) < 2:
        padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        return [None if padded else "" for padded in padding] if any(padding) else None
    import transfer_queue

    fields = transfer_queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"]
    )["extra_fields"]
    fields = (
        fields.tolist() if hasattr(fields, "tolist") else fields
    )  # of equal dicts tensordict makes no list
    return [
        None if tag.get("is_padding", False) else str(extra.get(KEY) or "")
        for tag, extra in zip(batch.tags, fields, strict=True)
    ]


_patch = partial(Patch, requires="verl>=0.9", evidence="optional", scope=frozenset({"driver"}))

MEASURE = _patch(
    id="fp8.verl.calculate_debug_metrics",
    targets=("verl.utils.debug.metrics:calculate_debug_metrics",),
    wrapper=on_debug_metrics,
    contract=Contract(params=("data",), mentions=("data.batch",)),
    why="A rollout that drifts from the trainer harms training long before rewards show it, and verl does "
    "not say which update or layer caused it.",
    how="Adds mismatch/* to verl's metrics, per precision in a mixed fleet, and reports an update after which k3 "
    "jumps with the layers whose rounding error grew most.",
    remove_when="verl compares updates, and its rollouts report their rounding errors.",
)

PRECISIONS = _patch(
    id="fp8.verl.compute_old_log_prob",
    targets=("verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_old_log_prob",),
    wrapper=on_old_log_prob,
    contract=Contract(params=("batch", "metrics"), mentions=("calculate_debug_metrics", "self.config")),
    needs=("fp8.verl.calculate_debug_metrics",),
    why="verl's debug metrics see tensors only, neither padding nor the replica of a sample.",
    how="Looks up what precision each sample carries, and which samples are padding.",
    remove_when="verl's metrics are per replica.",
)
