"""What a comparison of an engine with a trainer's model found."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashpatch.verify.exact.causes import Cause

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

    Attributes:
        rank: of a tensor-parallel engine: the rank, or ranks, that differ, or the two that disagree; "" if all do, or it is not known.
        kind: of the gap, one of `forced.KINDS`, which expert or rows, or how far out turns were compared.
    """

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
class Certificate:
    """What the comparison found.

    Attributes:
        places: in the order of the forward pass.
        kl, kl_rounding: mean over positions of KL(model || engine), nats; and of the model rounded as the engine is.
        largest, largest_rounding: largest difference of a log-probability of the likeliest token, nats; likewise.
        problem: why nothing could be compared, "" if it could.
        syncs: per sync of the same weights, the first module that changed, "" if none did.
        seconds: what it took, by part.
        left_out: what was not compared: of what the job's engine does, and of modules.
        quantization: how the engine's weights are quantized, "" if they are not.
        causes: what is left of the gap with one cause switched off, if asked for.
        engine: the package whose engine it is, "" if none was opened.
        prompt: on which tokens, in words.
    """

    places: list[Place]
    kl: float = 0.0
    kl_rounding: float = 0.0
    largest: float = 0.0
    largest_rounding: float = 0.0
    problem: str = ""
    syncs: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    quantization: str = ""
    causes: tuple[Cause, ...] = ()
    engine: str = ""
    prompt: str = ""

    @property
    def first(self) -> Place | None:
        """The first place that differs by more than rounding."""
        return next((place for place in self.places if place.differs), None)

    @property
    def ok(self) -> bool:
        return not self.problem and self.first is None and not any(self.syncs)

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        first = self.first
        return {**asdict(self), "ok": self.ok, "first": first.name if first else None}
