"""Compute FlowRL's loss in plain floating-point numbers, without tensors, as a reference that shares no code with what it checks.

Source: FlowRL (arXiv 2509.15207), its final objective."""

from __future__ import annotations

import math
from collections.abc import Sequence


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


def partition(
    mean_hidden: Sequence[float], layers: Sequence[tuple[Sequence[Sequence[float]], Sequence[float]]]
) -> float:
    """Return log Z from the mean hidden state of a prompt's tokens, and weight rows and bias of each linear layer.

    Between two of them is GELU, then a LayerNorm whose scale is 1 and whose shift is 0, as initialized."""
    values = list(mean_hidden)
    for at, (weight, bias) in enumerate(layers):
        values = [
            math.fsum(w * v for w, v in zip(row, values, strict=True)) + b
            for row, b in zip(weight, bias, strict=True)
        ]
        if at < len(layers) - 1:
            values = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in values]
            centre = math.fsum(values) / len(values)
            spread = math.fsum((v - centre) ** 2 for v in values) / len(values)
            values = [(v - centre) / math.sqrt(spread + 1e-5) for v in values]
    (log_z,) = values
    return log_z
