"""Measure the gap between two policies on tokens that one of them drew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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


def observe(rollout: Any, trainer: Any, mask: Any, batch: Batch) -> dict[str, float]:
    """Measure a batch: return ``mismatch/*``, and write the ledger."""
    known = batch.precisions if batch.precisions is not None and len(batch.precisions) == len(mask) else None
    if known is not None:
        mask = mask * mask.new_tensor([precision is not None for precision in known])[:, None]
    found = {"": measure(rollout, trainer, mask, batch.cap, batch.truncated)}
    for precision in sorted({name for name in known or () if name}):
        mine = mask * mask.new_tensor([name == precision for name in known or ()])[:, None]
        found[precision] = measure(rollout, trainer, mine, batch.cap, batch.truncated)
    step = ledger.notes().get("sync_step")
    ledger.note(mismatch={name or "all": {"sync_step": step, **gap} for name, gap in found.items()})
    return {
        f"mismatch/{key}{name and '/'}{name}": value
        for name, gap in found.items()
        for key, value in gap.items()
    }
