"""Compute FlowRL's loss in float64, as a reference that shares no code with what it checks.

Source: FlowRL (arXiv 2509.15207), its final objective."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional


def response_loss(
    log_z: float,
    log_p: Sequence[float],
    log_p_old: Sequence[float],
    log_p_ref: Sequence[float],
    reward: float,
    *,
    beta: float,
    epsilon: float,
    weight: str = "clip",
    length: str = "mean",
) -> float:
    """Return the loss of one response from the logprobs of its tokens, under the policy, the one that sampled it and the reference.

    Args:
        log_z: log Z of its prompt; logarithms are natural.
        reward: its group-normalised reward, with the factor ``beta``.
        epsilon: half the width of the clip range.
        weight: ``clip`` (the paper), ``raw`` (the published code) or ``none``.
        length: ``mean`` (the paper) or ``sum``."""
    share = len(log_p) if length == "mean" else 1
    ratio = math.exp(math.fsum(log_p) - math.fsum(log_p_old))
    w = {"clip": min(max(ratio, 1 - epsilon), 1 + epsilon), "raw": ratio, "none": 1.0}[weight]
    residual = log_z + math.fsum(log_p) / share - beta * reward - math.fsum(log_p_ref) / share
    return w * residual**2


def group_log_z(alone: Sequence[float], lengths: Sequence[int]) -> float:
    """Return the z for which the average of ``exp(length (alone - z))`` over a group is 1, by bisection.

    ``alone`` is what each response alone would take log Z for, ``beta r + (log p_ref - log p) / length``; lengths are 1 if the
    loss sums."""
    low, high = min(alone), max(alone)
    for _ in range(200):
        middle = (low + high) / 2
        terms = [length * (one - middle) for one, length in zip(alone, lengths, strict=True)]
        top = max(terms)
        above = top + math.log(math.fsum(math.exp(term - top) for term in terms) / len(terms)) > 0
        low, high = (middle, high) if above else (low, middle)
    return low


def partition(mean_hidden: torch.Tensor, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return log Z from the mean hidden state of a prompt's tokens, and weight and bias of each linear layer, all float64.

    Between two of them is GELU, then a LayerNorm whose scale is 1 and whose shift is 0, as initialized."""
    values = mean_hidden
    for at, (weight, bias) in enumerate(layers):
        if at:
            values = functional.gelu(values)
            values = functional.layer_norm(values, values.shape)
        values = weight @ values + bias
    return values.item()
