"""What a comparison of an engine with a trainer's model found."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DISTRIBUTIONS = "the distributions"
"""The place whose gap is the mean KL."""


def because(error: Exception) -> str:
    """Say why nothing could be compared; of an error without words its kind and the line that raised it, too."""
    said = " ".join(str(error).split())[:300]
    if " " not in said:  # nothing, or a key
        said = ": ".join(filter(None, (type(error).__name__, said)))
        for frame in traceback.extract_tb(error.__traceback__)[-1:]:
            said += f" at {'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"
    return f"cannot compare here: {said}"


@dataclass(frozen=True)
class Place:
    """One place's gap, see `forced.Gap`, and the largest that rounding explains.

    Of a tensor-parallel engine ``rank`` names the ranks that differ, or the two that disagree; "" if all do, or it is not
    known. ``kind`` is that of the gap, one of `forced.KINDS`, which expert or rows, or how far out turns were compared."""

    name: str
    gap: float
    bound: float
    rank: str = ""
    kind: str = ""

    @property
    def differs(self) -> bool:
        return not self.gap <= self.bound

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.name, self.rank, self.kind)))


@dataclass(frozen=True)
class Cause:
    """One cause: what was switched, to what, and the mean KL(model || engine) with that, nats.

    ``share`` is the part of the gap that went with it, less than 0 if the gap grew. Both are None if it could not be had;
    ``problem`` says why."""

    name: str
    to: str
    kl: float | None = None
    share: float | None = None
    problem: str = ""

    @property
    def part(self) -> str:
        """The share as it is printed: a percentage, or how often the gap is what it was where it more than doubles."""
        if self.share is None:
            return ""
        return f"{round(self.share, 2) + 0.0:.0%}" if self.share >= -1 else f"gap x {1 - self.share:,.0f}"


@dataclass(frozen=True)
class Certificate:
    """What the comparison found, at places in the order of the forward pass; texts are "" where there is nothing to say.

    Attributes:
        kl, kl_rounding: mean over positions of KL(model || engine), nats; and of the model rounded as the engine is.
        problem: why nothing could be compared.
        syncs: per sync of the same weights, the first module that changed.
        seconds: what it took, by part.
        left_out: what the job's engine does and the compared one does not.
        not_compared: what of the model no comparison reached.
        quantization: how the engine's weights are quantized.
        causes: what is left of the gap with one cause switched off, if asked for.
        engine: the package whose engine it is.
        prompt: on which tokens, in words."""

    places: list[Place]
    kl: float = 0.0
    kl_rounding: float = 0.0
    problem: str = ""
    syncs: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    quantization: str = ""
    causes: tuple[Cause, ...] = ()
    engine: str = ""
    prompt: str = ""

    @property
    def first(self) -> Place | None:
        """The first place that differs by more than rounding."""
        return next((place for place in self.places if place.differs), None)

    @property
    def agrees(self) -> bool:
        """Whether nothing differs of what was compared."""
        return not self.problem and self.first is None and not any(self.syncs)

    @property
    def ok(self) -> bool:
        """Whether all was compared, and agrees."""
        return self.agrees and not self.not_compared

    def as_json(self) -> dict[str, Any]:
        first = self.first
        return {**asdict(self), "ok": self.ok, "agrees": self.agrees, "first": first.name if first else None}
