"""Find the tokens that truncated sampling kept, carry them with a log-probability, and renormalize over them.

Under top-p, top-k or min-p a token is drawn from the kept set K of its position, with the policy's probabilities
divided by their sum over K. Processed log-probabilities are those of K, and minus infinity elsewhere. The trainer's
log-probability of the same draw is its logit minus the logarithm of the sum of exponentials over K."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import torch

NO_SET = -1
"""Fills up a row of ids; a row of nothing else belongs to a token that was not sampled, or whose set was lost."""

TOO_MANY = -2
"""First in the row of a token whose set has more ids than are carried."""

_ROUNDING = 1e-5  # of the sum of a set's probabilities, in float32


class Drawn(float):
    """Hold the log-probability of a sampled token, with the ids that it was drawn from.

    Whatever extends, cuts or shifts a list of log-probabilities with its tokens keeps the ids where they belong."""

    __slots__ = ("kept",)
    kept: numpy.ndarray

    def __new__(cls, value: float, kept: numpy.ndarray) -> Drawn:
        self = super().__new__(cls, value)
        self.kept = kept
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Drawn, (float(self), self.kept)


def kept_ids(position: Mapping[int, Any], width: int) -> numpy.ndarray:
    """Return the kept ids of one position, int32, at most ``width``; ``[TOO_MANY]`` if there are others. ``position``:
    processed log-probabilities, as objects with ``logprob`` by token id, of the sampled token and the ``width``
    likeliest ones."""
    import numpy

    found = {id: float(one.logprob) for id, one in position.items()}
    ids = [id for id, value in found.items() if value > -math.inf]
    # If one of the likeliest ids was not kept, none beyond them was.
    whole = len(ids) < len(found) or sum(map(math.exp, found.values())) > 1 - _ROUNDING
    return numpy.array(ids if whole and len(ids) <= width else [TOO_MANY], dtype=numpy.int32)


def table(logprobs: Sequence[float], width: int) -> numpy.ndarray:
    """Return the ids that each `Drawn` carries, ``(tokens, width)``, int32, filled up with `NO_SET`."""
    import numpy

    rows = numpy.full((len(logprobs), width), NO_SET, dtype=numpy.int32)
    for row, value in zip(rows, logprobs, strict=True):
        kept = getattr(value, "kept", ())
        row[: len(kept)] = kept
    return rows


def renormalized(logits: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return each label's log-probability over the ids of its row, ``(tokens,)``, in float32 or better.

    Args:
        logits: ``(tokens, vocabulary)``, after temperature.
        labels: ``(tokens,)``, each among the ids of its row.
        ids: ``(tokens, width)``, filled up with `NO_SET`; in a row without any the result is 0, and has no gradient."""
    import torch

    absent = ids < 0
    chosen = logits.gather(-1, ids.clamp(min=0).long())
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    known = ~absent.all(-1, keepdim=True)
    chosen = torch.where(known, chosen.masked_fill(absent, -math.inf), 0.0)  # no infinity without any id
    at = (ids == labels[:, None]).int().argmax(-1, keepdim=True)
    found = chosen.gather(-1, at) - chosen.logsumexp(-1, keepdim=True)
    return torch.where(known, found, 0.0).squeeze(-1)
