"""Compare experts one by one: one of many adds little to what a block returns, and that to few tokens.

What one adds has a direction that the others' has not, and that rounding has not: so much of it as a difference has is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashpatch.verify.exact.calls import tensors_in

LEAST = 1 / 8
"""A part of what an expert adds that may be missing whatever rounding does."""
MOST = 1 / 2
"""The part that a wrong one surely lacks."""
DEVIATIONS = 6.0
"""Standard deviations of what rounding has in a direction by chance."""


@dataclass(frozen=True)
class Part:
    """One expert's part in the difference of a block.

    Attributes:
        missing: what is missing, or too much, of what it adds, as a part of that.
        chance: the standard deviation of that by a difference as large as the block's output and without direction.
    """

    missing: float
    chance: float


Parts = Mapping[int, Part]


def parts(
    experts: torch.nn.Module, given: tuple[Any, ...], ours: torch.Tensor, theirs: torch.Tensor, kept: Any
) -> Parts:
    """Return by expert its part in the difference of two outputs of a block.

    Args:
        experts: the trainer's.
        given: to them: hidden states, and by token the experts and their weights, [T, K].
        ours, theirs: the block's, [T, C].
        kept: the tokens that are compared.
    """
    tensors = tensors_in(given)
    if len(tensors) < 3 or tensors[1].shape != tensors[2].shape or tensors[1].is_floating_point():
        return {}
    hidden, chosen, weights = tensors[0].reshape(-1, tensors[0].shape[-1]), tensors[1], tensors[2]
    each = chosen.shape[1]
    rows = hidden.repeat_interleave(each, 0)  # one for each expert of a token
    added = experts.forward(rows, chosen.reshape(-1, 1), weights.reshape(-1, 1)).detach().float().cpu()
    is_kept = torch.zeros(len(chosen), dtype=torch.bool)
    is_kept[kept] = True
    taken, difference, found = chosen.flatten().cpu(), theirs - ours, {}
    for expert in taken[is_kept.repeat_interleave(each)].unique().tolist():
        places = ((taken == expert) & is_kept.repeat_interleave(each)).nonzero().flatten()
        own, at = added[places], places // each
        norm = own.norm().clamp(min=1e-30)
        missing = (own * difference[at]).sum().abs() / norm**2
        found[expert] = Part(missing.item(), (ours[at].norm() / norm / own.numel() ** 0.5).item())
    return found


def limits(found: Parts, rounding: Parts, size: float, factor: float) -> dict[int, float]:
    """Return what may be missing of each; more than `MOST` if too few tokens, or too light ones, show what it adds.

    Args:
        found: their parts.
        rounding: those in what rounding does, of which a difference may have ``factor`` times as much.
        size: of what rounding does, as a part of the block's output.
    """
    nothing = Part(0.0, 0.0)
    return {
        expert: max(LEAST, DEVIATIONS * size * part.chance, factor * rounding.get(expert, nothing).missing)
        for expert, part in found.items()
    }
