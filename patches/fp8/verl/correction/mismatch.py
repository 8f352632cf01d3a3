"""Measure the gap between the rollout's policy and the trainer's after each update.

verl has both logprobs of every token when it computes its own debug metrics. There the gap is measured, per
precision in a mixed fleet."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.patches._shared.context import holding
from flashpatch.patches.fp8.mismatch.monitor import Batch, observe
from flashpatch.patches.fp8.precision import fleet
from flashpatch.patches.fp8.verl.correction import truncated_sampling

if TYPE_CHECKING:
    from flashpatch.patches._shared.verl_config import Get

CAP = 2.0
"""Largest importance weight of a token: verl's own default, and that of its TIS presets."""

KEY = "rollout_precision"
"""Key of a sample's precision among verl's extra fields."""

BATCH: ContextVar[Batch] = ContextVar("batch", default=Batch())


patches = Patches("fp8", "verl>=0.9", evidence="optional", scope="driver")


@patches.wrap(
    "verl.utils.debug.metrics:calculate_debug_metrics",
    relies_on="data.batch",
    why="A rollout that drifts from the trainer harms training long before rewards show it, and verl measures no KL of the two.",
    remove_when="verl logs an unbiased estimate of it, per precision.",
)
def calculate_debug_metrics(original, data: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Add mismatch/* to verl's metrics, per precision in a mixed fleet."""
    found = original(data, *args, **kwargs)
    rollout, trainer = data.batch["rollout_log_probs"], data.batch["old_log_probs"]
    mask = data.batch["response_mask"] if "response_mask" in data.batch else data.batch["attention_mask"]
    mask = mask[:, -rollout.shape[1] :]
    batch = BATCH.get()
    # The older trainer keeps extra fields in the batch, and its process has checked the configuration.
    if batch.precisions is None and KEY in data.non_tensor_batch:
        batch = replace(batch, precisions=[name or "" for name in data.non_tensor_batch[KEY].tolist()])
    if ledger.notes().get(truncated_sampling.NOTE, {}).get("measurable"):
        batch = replace(batch, truncated=True)
    return {**found, **observe(rollout, trainer, mask, batch)}


@patches.wrap(
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_old_log_prob",
    relies_on=("calculate_debug_metrics", "self.config"),
    params=("batch", "metrics"),
    why="verl's debug metrics see tensors only, neither padding nor the replica of a sample.",
    remove_when="verl's metrics are per replica.",
)
def compute_old_log_prob(original, self, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Look up what precision each sample carries, and which samples are padding."""
    truncated = truncated_sampling.is_measurable(_reader(self.config))
    with holding(BATCH, Batch(_cap(self.config), _precisions(batch), truncated)):
        return original(self, batch, *args, **kwargs)


def _reader(config: Any) -> Get:
    from omegaconf import OmegaConf

    return lambda path, default=None: OmegaConf.select(config, path, default=default)


def _cap(config: Any) -> float:
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
    # of equal dicts tensordict makes no list
    fields = fields.tolist() if hasattr(fields, "tolist") else fields
    return [
        None if tag.get("is_padding", False) else str(extra.get(KEY) or "")
        for tag, extra in zip(batch.tags, fields, strict=True)
    ]


def note_precision(output: Any, replica: int) -> None:
    """Add the precision of a replica, in a fleet of several precisions, to verl's ``TokenOutput``."""
    options = engine.options("fp8")
    if len(options["fleet"]) > 1:
        entries = fleet.entries(options["precision"], options["scheme"], options["fleet"])
        output.extra_fields[KEY] = fleet.assigned(entries, replica).precision
