"""Measure the gap between the rollout's policy and the trainer's after each update.

verl has both logprobs of every token when it computes its own debug metrics. There the gap is measured, per
precision in a mixed fleet, and compared with that of earlier updates: an update after which it jumps is
reported, with the layers whose rounding error grew most.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from flashpatch import engine, ledger
from flashpatch.patches.fp8.verl.correction import truncated_sampling
from flashpatch.patches.fp8.verl.correction.rollout_correction import CAP
from flashpatch.record import Contract, Patch

if TYPE_CHECKING:
    import torch

    from flashpatch.patches._shared.verl_config import Get

logger = logging.getLogger("flashpatch.fp8")

KEY = "rollout_precision"
"""Key of a sample's precision among verl's extra fields."""

_BOUND = 20.0  # of a log ratio, as in verl
_HISTORY = 8  # updates that a new one is compared with
_MIN_HISTORY = 2  # of them, before anything is called a jump
_FLOOR = 1e-5  # k3 below which nothing is a jump: float noise
_SHOWN = 5  # layers named


@dataclass(frozen=True)
class Batch:
    """Facts about the current batch besides its tensors.

    Attributes:
        cap: truncation of the importance weights.
        precisions: per sample; "" where unknown, None for padding. None: unknown for all.
        truncated: whether the rollout's logprobs are normalized over fewer tokens than the trainer's.
    """

    cap: float = CAP
    precisions: Sequence[str | None] | None = None
    truncated: bool = False


BATCH: ContextVar[Batch] = ContextVar("batch", default=Batch())


def measure(
    rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor, cap: float, truncated: bool = False
) -> dict[str, float]:
    """Measure the gap between two policies on tokens sampled from the first.

    With the log ratio ``d = trainer - rollout`` per token: ``k1`` is the mean of ``-d`` and ``k3`` that of
    ``exp(d) - d - 1``, both estimates of KL(rollout || trainer), the second never negative (Schulman 2020).

    Args:
        rollout: [samples, tokens], logprobs of the tokens under the policy that sampled them.
        trainer: the same under the trainer's.
        mask: [samples, tokens], 1 for tokens that count.
        cap: where importance weights are truncated.
        truncated: whether the rollout's are normalized over fewer tokens, see `truncated_sampling`.

    Returns:
        ``tokens``, ``k1``, ``k3``, ``ratio_mean``, ``ratio_std`` and ``clip_fraction`` (of tokens whose ratio is
        above ``cap``), with ``truncated`` also ``kept_mass`` and ``kept_mass_error``; only ``tokens``, 0, where
        none counts.
    """
    d = (trainer - rollout)[mask.bool()].double().clamp(-_BOUND, _BOUND)
    if d.numel() == 0:
        return {"tokens": 0.0}
    ratio = d.exp()
    kept = truncated_sampling.measure_kept_mass(ratio) if truncated else {}
    return {
        "tokens": float(d.numel()),
        "k1": float(-d.mean()),
        "k3": float((ratio - d - 1).mean()),
        "ratio_mean": float(ratio.mean()),
        "ratio_std": float(ratio.std(correction=0)),
        "clip_fraction": float((ratio > cap).double().mean()),
        **kept,
    }


class Monitor:
    """Compare the gap of each update with that of earlier ones."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {}
        self._errors: dict[str, float] = {}
        self._before: dict[str, float] = {}

    def updated(self, errors: Mapping[str, float]) -> None:
        """Note a new policy, whose layers were rounded with these relative errors."""
        if errors:
            self._before, self._errors = self._errors, dict(errors)

    def jump(self, precision: str, k3: float, factor: float) -> float | None:
        """Return the usual k3 of this precision if the new one is more than ``factor`` times that, else None.

        A value that is a jump is not remembered, so that a second bad update is one too. NaN is a jump.
        """
        seen = self._seen.setdefault(precision, deque(maxlen=_HISTORY))
        usual = median(seen) if len(seen) >= _MIN_HISTORY else None
        stands_out = usual is not None and factor > 0 and not k3 <= factor * max(usual, _FLOOR)
        if not stands_out and k3 == k3:
            seen.append(k3)
        return usual if stands_out else None

    def grown(self) -> list[tuple[str, float, float]]:
        """Return layers with their rounding error before and after the last update, largest growth first."""
        both = [(name, self._before[name], new) for name, new in self._errors.items() if name in self._before]
        return sorted((row for row in both if row[2] > row[1]), key=lambda row: row[1] / row[2])[:_SHOWN]


MONITOR = Monitor()


def observe(
    monitor: Monitor, rollout: Any, trainer: Any, mask: Any, batch: Batch, factor: float
) -> dict[str, float]:
    """Measure a batch: return metrics for verl, write the ledger, warn where the last update is suspect."""
    known = batch.precisions if batch.precisions is not None and len(batch.precisions) == len(mask) else None
    if known is not None:
        mask = mask * mask.new_tensor([precision is not None for precision in known])[:, None]
    found = {"": measure(rollout, trainer, mask, batch.cap, batch.truncated)}
    for precision in sorted({name for name in known or () if name}):
        mine = mask * mask.new_tensor([name == precision for name in known or ()])[:, None]
        found[precision] = measure(rollout, trainer, mine, batch.cap, batch.truncated)
    judged = {name: gap for name, gap in found.items() if "k3" in gap and (name or len(found) == 1)}
    suspects = [
        (name, usual, gap["k3"])
        for name, gap in judged.items()
        if (usual := monitor.jump(name, gap["k3"], factor)) is not None
    ]
    step = ledger.notes().get("sync_step")
    if suspects:
        grown = monitor.grown()
        _warn(step, suspects, grown)
        ledger.note(
            suspect={
                "sync_step": step,
                "k3": {name or "all": [usual, k3] for name, usual, k3 in suspects},
                "layers": [list(row) for row in grown],
            }
        )
    ledger.note(mismatch={name or "all": {"sync_step": step, **gap} for name, gap in found.items()})
    metrics = {
        f"mismatch/{key}{name and '/'}{name}": value
        for name, gap in found.items()
        for key, value in gap.items()
    }
    return {**metrics, "mismatch/suspect": float(bool(suspects))}


def _warn(step: Any, suspects: list[tuple[str, float, float]], grown: list[tuple[str, float, float]]) -> None:
    gaps = ", ".join(
        f"k3{name and ' of '}{name} is {k3:.3g}, usually {usual:.3g}" for name, usual, k3 in suspects
    )
    layers = (
        ", ".join(f"{name} {old:.2%} to {new:.2%}" for name, old, new in grown) or "none (or not measured)"
    )
    logger.warning(
        "the update of step %s is suspect: %s. Rounding errors grew most in: %s", step, gaps, layers
    )


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
    truncated = truncated_sampling.is_measurable(_reader(self.config))
    token = BATCH.set(Batch(_cap(self.config), _precisions(batch), truncated))
    try:
        return original(self, batch, *args, **kwargs)
    finally:
        BATCH.reset(token)


def _reader(config: Any) -> Get:
    from omegaconf import OmegaConf

    return lambda path, default=None: OmegaConf.select(config, path, default=default)


def _cap(config: Any) -> float:
    """Return the upper bound of importance weights in the config; verl's default where it has none."""
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
