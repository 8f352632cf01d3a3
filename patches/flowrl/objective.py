"""Compute FlowRL's trajectory-balance loss, one number per response, from plain tensors. Needs torch.

Source: FlowRL (arXiv 2509.15207), its objective with length normalisation, reward shaping and the clipped,
detached importance weight::

    w (log Z(x) + 1/|y| log p(y|x) - beta r(x, y) - 1/|y| log p_ref(y|x))^2,
    w = clip(p(y|x) / p_old(y|x), 1 - low, 1 + high)"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Balance:
    """Hold the terms of the loss, each ``(batch,)``, with gradient if the loss needs it.

    Attributes:
        residual: by how much the trajectory balance is violated.
        weight: the importance weight, without gradient.
        clipped: 1.0 if a bound changed the weight."""

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
        correction: verl's rollout-correction weights; a response's is their mean."""
    counted = _Responses(mask, torch.promote_types(log_prob.dtype, torch.float32))
    over = counted.mean if length == "mean" else counted.total
    residual = log_z.to(counted.wide) + over(log_prob) - beta * counted.mean(reward) - over(ref_log_prob)
    ratio = counted.total(log_prob.detach() - old_log_prob)
    weights, clipped = _weights(ratio, weight, low, high, cap)
    if correction is not None:
        weights = weights * counted.mean(correction)
    return Balance(residual, (weights * counted.there).detach(), clipped * counted.there)


def group_log_z(
    log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    reward: torch.Tensor,
    mask: torch.Tensor,
    groups: torch.Tensor,
    *,
    beta: float,
    length: str,
) -> torch.Tensor:
    """Estimate log Z from the responses to each prompt, by importance sampling.

    The average of ``p_ref / p exp(beta r)`` over responses of any policy ``p`` has Z as its expectation. With
    ``length="sum"`` log Z is the logarithm of that average; with ``"mean"`` it is the z that solves ``average of
    (p_ref / p) exp(|y| (beta r - z)) = 1``, of which the former is the case ``|y| = 1``. If the policy is the
    target it is exact. A learned log Z tends to the mean of what each response alone would take it for, which is
    lower: by the policy's KL from the target, per token with ``"mean"``.

    Args:
        log_prob: of each response token under the policy that sampled it; ``(batch, tokens)`` as in `balance`.
        ref_log_prob, reward, mask, beta, length: as in `balance`.
        groups: number of each response's prompt, ``(batch,)``, from 0. Groups must be whole.

    Returns:
        ``(batch,)``, without gradient, the same for all responses to a prompt; 0 for a prompt none of whose
        responses has tokens that count."""
    counted = _Responses(mask, torch.promote_types(log_prob.dtype, torch.float32))
    share = counted.tokens.clamp(min=1) if length == "mean" else torch.ones_like(counted.tokens)
    away = (counted.total(ref_log_prob) - counted.total(log_prob)).detach()
    alone = beta * counted.mean(reward).detach() + away / share  # the z that one response alone would give
    there, number = counted.there, int(groups.max()) + 1

    def summed(values: torch.Tensor) -> torch.Tensor:
        return alone.new_zeros(number).index_add(0, groups, torch.where(there, values, 0.0))

    def extreme(how: str, values: torch.Tensor, none: float) -> torch.Tensor:
        values = torch.where(there, values, none)
        return alone.new_full((number,), none).scatter_reduce(0, groups, values, how)

    numbers = summed(torch.ones_like(alone))
    low, high = extreme("amin", alone, math.inf), extreme("amax", alone, -math.inf)
    for _ in range(64):  # halvings: the average falls in z, and 1 lies between
        middle = (low + high) / 2
        terms = share * (alone - middle[groups])
        top = extreme("amax", terms, -math.inf)
        above = top + summed((terms - top[groups]).exp()).log() > numbers.log()
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return torch.where(numbers > 0, (low + high) / 2, 0.0)[groups]


class _Responses:
    """Sum and average the values of tokens that count, ``(batch, tokens)`` to ``(batch,)``, in dtype ``wide``."""

    def __init__(self, mask: torch.Tensor, wide: torch.dtype) -> None:
        self.mask, self.wide = mask, wide
        self.tokens = mask.to(wide).sum(1)
        self.there = self.tokens > 0

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask, values.to(self.wide), 0.0).sum(1)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        return self.total(values) / self.tokens.clamp(min=1)


def _weights(
    ratio: torch.Tensor, weight: str, low: float, high: float, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return importance weights from log-ratios ``(batch,)``, and where a bound changed them. Bounds are applied to
    the logarithm: the ratio of a long response overflows."""
    if weight == "none":
        return torch.ones_like(ratio), torch.zeros_like(ratio)
    least = math.log1p(-low) if weight == "clip" and low < 1 else -math.inf
    most = math.log1p(high) if weight == "clip" else math.inf
    if cap is not None:
        most = min(most, math.log(cap))
    bounded = ratio.clamp(max=most) if least == -math.inf else ratio.clamp(min(least, most), most)
    return bounded.exp(), (bounded != ratio).to(ratio.dtype)
