r"""Compute a GRPO loss whose gradient does not depend on how the batch was divided.

Per token minus advantage times the clipped ratio (GRPO, Shao et al. 2024, equations 19 and 20; async-grpo's
``grpo_loss.py``). Tokens are weighted, summed, and
divided by counts of the *whole* batch, over all micro-batches and ranks. Data-parallel wrappers (FSDP, DDP)
average gradients over ranks, so that the sum is multiplied with their number. What is then accumulated over
micro-batches and averaged over ranks equals one backward through the whole batch, for any split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashpatch.errors import PatchError

AGGREGATIONS = (
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-mean",
    "token-sum",
)
"""As verl names them: each token is divided by its sample's output length, by nothing, or by a constant, and
the sum by the number of samples; by the number of tokens; by nothing at all."""


@dataclass(frozen=True)
class Counts:
    """Hold the samples and tokens of a whole batch, over all micro-batches and ranks.

    Attributes:
        samples: number of samples with at least one output token.
        tokens: number of output tokens."""

    samples: int
    tokens: int


@dataclass(frozen=True)
class Clip:
    """Hold the bounds of the ratio between the policy and the policy of the advantages.

    Attributes:
        low, high: the ratio is clipped to [1 - low, 1 + high] (PPO, Schulman et al. 2017).
        dual: above 1: ratios above this count as this if the advantage is negative (Ye et al. 2019); None for no bound."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.dual is not None and self.dual <= 1:
            raise _refusal(f"dual is {self.dual}.", "Use a clip_ratio_c above 1.")


def count(mask: torch.Tensor, group: Any = None) -> Counts:
    """Count samples and tokens over all ranks of a group, or in this process alone for None; every rank must call it
    with the mask of its whole share of the batch, [B, L] or jagged, 1 (or True) at output tokens."""
    if mask.is_nested:
        marked = torch.nn.functional.pad((mask.values() != 0).long().cumsum(0), (1, 0))
        lengths = marked[mask.offsets()].diff()
    else:
        lengths = (mask != 0).sum(-1)
    both = torch.stack(((lengths > 0).sum(), lengths.sum()))
    if group is not None:
        torch.distributed.all_reduce(both, group=group)
    return Counts(*both.tolist())


def grpo_loss(
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    counts: Counts,
    *,
    world: int = 1,
    aggregation: str = "seq-mean-token-mean",
    constant: float | None = None,
    old_logprobs: torch.Tensor,
    clip: Clip,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the loss of one micro-batch, a scalar, and detached sums over its output tokens: ``tokens``, ``clipped`` and
    ``clipped_dual`` (tokens whose ratio was clipped), ``log_ratio`` (old minus new).

    Args:
        logprobs: [B, L], of the policy being trained, with gradient; float64 stays float64, others float32.
        advantages: [B, L] or [B].
        mask: [B, L], 1 or True at output tokens. What the other tensors hold elsewhere is never looked at.
        counts: of the whole batch, see `count`.
        world: number of ranks over which gradients are averaged.
        aggregation: one of `AGGREGATIONS`.
        constant: divisor of every token under ``seq-mean-token-sum-norm``.
        old_logprobs: [B, L], of the policy at the start of the step; the surrogate is the ratio to it.
        clip: clips the ratio.
        weights: [B, L], importance weights of the tokens, through which no gradient goes.

    Raises:
        PatchError: an unknown aggregation, or a constant is missing."""
    if aggregation not in AGGREGATIONS:
        raise _refusal(f"aggregation is {aggregation!r}.", f"Choose one of {', '.join(AGGREGATIONS)}.")
    if aggregation == "seq-mean-token-sum-norm" and not constant:
        raise _refusal(
            f"constant is {constant} under seq-mean-token-sum-norm; the width of a micro-batch, which verl falls back on, "
            "makes the loss depend on the split.",
            "Give a constant, such as the longest response (verl: actor.loss_scale_factor).",
        )
    kept = mask != 0
    new = _inside(logprobs, kept)
    old = _inside(old_logprobs, kept).detach()
    gain = _inside(advantages if advantages.ndim == 2 else advantages[:, None].expand_as(new), kept).detach()
    sums: dict[str, torch.Tensor] = {"tokens": kept.sum()}
    per_token = _surrogate(new, old, gain, clip, sums)
    if weights is not None:
        per_token = per_token * _inside(weights, kept).detach()
    return aggregate(per_token, kept, counts, aggregation, constant, world), sums


def aggregate(
    per_token: torch.Tensor,
    mask: torch.Tensor,
    counts: Counts,
    aggregation: str = "seq-mean-token-mean",
    constant: float | None = None,
    world: int = 1,
) -> torch.Tensor:
    """Sum values of tokens into a micro-batch's share of the batch's loss.

    Args: see `grpo_loss`; ``per_token`` is [B, L] and finite where the mask is 1."""
    values = per_token.masked_fill(mask == 0, 0.0)
    if aggregation == "seq-mean-token-mean":
        values = values / (mask != 0).sum(-1, keepdim=True).clamp(min=1)
    total = values.sum() * world
    if aggregation == "token-mean":
        return total / max(counts.tokens, 1)
    if aggregation == "token-sum":
        return total
    if aggregation == "seq-mean-token-sum-norm":
        total = total / constant
    return total / max(counts.samples, 1)


def _surrogate(new, old, gain, clip: Clip, sums: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return minus advantage times ratio, clipped if that makes it larger (the pessimistic bound)."""
    log_ratio = new - old
    sums["log_ratio"] = -log_ratio.detach().sum()
    # exp(20) is far beyond any clip; without a bound a single token could overflow.
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    plain = -gain * ratio
    bounded = -gain * ratio.clamp(1 - clip.low, 1 + clip.high)
    sums["clipped"] = (bounded > plain).sum()
    chosen = torch.maximum(plain, bounded)
    if clip.dual is not None:
        ceiling = -gain * clip.dual
        sums["clipped_dual"] = ((chosen > ceiling) & (gain < 0)).sum()
        chosen = torch.where(gain < 0, torch.minimum(chosen, ceiling), chosen)
    return chosen


def _inside(values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Widen the dtype and set values outside the mask to 0, so that they do not reach the gradient."""
    wide = values if values.dtype == torch.float64 else values.float()
    return wide.masked_fill(~kept, 0.0)


def _refusal(problem: str, advice: str) -> PatchError:
    return PatchError(problem, patch="grpo.verl.register_policy_loss", advice=advice)
