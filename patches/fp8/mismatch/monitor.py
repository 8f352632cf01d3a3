"""Compare the gap after each update with that of earlier ones, and report the updates after which it jumps."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from flashpatch import ledger

if TYPE_CHECKING:
    import torch

CAP = 2.0
"""Largest importance weight of a token if a trainer names no other: verl's default."""

_BOUND = 20.0  # of a log ratio, as in verl


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
        truncated: whether the rollout's are normalized over fewer tokens, the kept set of each position.

    Returns:
        ``tokens``, ``k1``, ``k3``, ``ratio_mean``, ``ratio_std`` and ``clip_fraction`` (of tokens whose ratio is
        above ``cap``); only ``tokens``, 0, where none counts. With ``truncated`` also ``kept_mass``, an unbiased
        estimate of the trainer's probability of the kept set, a mean over positions, and ``kept_mass_error``, its
        standard error, which grows with the difference of the policies; for equal ones each ratio is the kept mass."""
    d = (trainer - rollout)[mask.bool()].double().clamp(-_BOUND, _BOUND)
    if d.numel() == 0:
        return {"tokens": 0.0}
    ratio = d.exp()
    mean, deviation = float(ratio.mean()), float(ratio.std(correction=0))
    kept = {"kept_mass": mean, "kept_mass_error": deviation / math.sqrt(ratio.numel())} if truncated else {}
    return {
        "tokens": float(d.numel()),
        "k1": float(-d.mean()),
        "k3": float((d.expm1() - d).clamp(min=0).mean()),
        "ratio_mean": mean,
        "ratio_std": deviation,
        "clip_fraction": float((ratio > cap).double().mean()),
        **kept,
    }


logger = logging.getLogger("flashpatch.fp8")

_HISTORY = 8  # updates that a new one is compared with
_MIN_HISTORY = 2  # of them, before anything is called a jump
_FLOOR = 1e-5  # k3 below which nothing is a jump: float noise
_SHOWN = 5  # layers named


@dataclass(frozen=True)
class Batch:
    """Facts about the current batch besides its tensors.

    Attributes:
        cap: truncation of the importance weights.
        precisions: per sample; "" if unknown, None for padding. None: unknown for all.
        truncated: whether the rollout's logprobs are normalized over fewer tokens than the trainer's."""

    cap: float = CAP
    precisions: Sequence[str | None] | None = None
    truncated: bool = False


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

        A value that is a jump is not remembered, so that a second bad update is one too. NaN is a jump."""
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
    """Measure a batch: return ``mismatch/*``, write the ledger, warn if the last update is suspect."""
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
