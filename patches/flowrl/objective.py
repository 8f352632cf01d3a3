"""Compute FlowRL's trajectory-balance loss, one number per response, from plain tensors. Needs torch.

Source: FlowRL (arXiv 2509.15207), its objective with length normalisation, reward shaping and the clipped,
detached importance weight::

    w (log Z(x) + 1/|y| log p(y|x) - beta r(x, y) - 1/|y| log p_ref(y|x))^2,
    w = clip(p(y|x) / p_old(y|x), 1 - low, 1 + high)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Balance:
    """Hold the terms of the loss, each ``(batch,)``, with gradient where the loss needs it.

    Attributes:
        residual: by how much the trajectory balance is violated.
        weight: the importance weight, without gradient.
        clipped: 1.0 where a bound changed the weight.
    """

    residual: torch.Tensor
    weight: torch.Tensor
    clipped: torch.Tensor

    @property
    def loss(self) -> torch.Tensor:
        return self.weight * self.residual.square()


def balance(
    log_z: torch.Tensor,
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    reward: torch.Tensor,
    mask: torch.Tensor,
    *,
    beta: float,
    length: str,
    weight: str,
    low: float,
    high: float,
    cap: float | None,
    correction: torch.Tensor | None = None,
) -> Balance:
    """Compute the squared difference between each response's log-probability and its scaled reward.

    Args:
        log_z: ``(batch,)``.
        log_prob: of each response token under the policy; like all below ``(batch, tokens)``.
        old_log_prob: under the policy that the batch's advantages belong to.
        ref_log_prob: under the reference policy.
        reward: the same for every token of a response, or their mean is taken; such as a group's advantage.
        mask: true for the tokens that count; a response without any gets weight 0.
        beta, length, weight, cap: see `flashpatch.patches.flowrl.options`.
        low, high: the weight's clip range is ``[1 - low, 1 + high]``.
        correction: verl's rollout-correction weights; a response's is their mean.
    """
    wide = torch.promote_types(log_prob.dtype, torch.float32)
    counted = mask.to(wide)
    tokens = counted.sum(1)

    def total(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values.to(wide), 0.0).sum(1)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return total(values) / tokens.clamp(min=1)

    over = mean if length == "mean" else total
    residual = log_z.to(wide) + over(log_prob) - beta * mean(reward) - over(ref_log_prob)
    ratio = total(log_prob.detach() - old_log_prob)
    weights, clipped = _weights(ratio, weight, low, high, cap)
    if correction is not None:
        weights = weights * mean(correction)
    return Balance(residual, (weights * (tokens > 0)).detach(), clipped * (tokens > 0))


def _weights(
    ratio: torch.Tensor, weight: str, low: float, high: float, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weights from log-ratios ``(batch,)``, and where a bound changed them. Bounds are applied to
    the logarithm: the ratio of a long response overflows."""
    if weight == "none":
        return torch.ones_like(ratio), torch.zeros_like(ratio)
    least = math.log1p(-low) if weight == "clip" and low < 1 else -math.inf
    most = math.log1p(high) if weight == "clip" else math.inf
    if cap is not None:
        most = min(most, math.log(cap))
    bounded = ratio.clamp(max=most) if least == -math.inf else ratio.clamp(min(least, most), most)
    return bounded.exp(), (bounded != ratio).to(ratio.dtype)
