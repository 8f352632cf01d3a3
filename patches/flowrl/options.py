"""The family's options, with the ranges that they must be in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashpatch import engine
from flashpatch.errors import PatchError
from flashpatch.record import Option

FAMILY = "flowrl"

OPTIONS = {
    "beta": Option(15.0, "how much the reward counts against the logprobs, above 0", kind=float),
    "length": Option(
        "mean",
        "the logprob of a response in the residual: mean over its tokens (the paper's), or sum",
        ("mean", "sum"),
    ),
    "weight": Option(
        "clip",
        "importance weight of a response: clip (the paper's; by actor.clip_ratio_low and _high), raw (as the "
        "published code computes), or none",
        ("clip", "raw", "none"),
    ),
    "weight_cap": Option(None, "upper bound of the importance weight, above 0; none if unset", kind=float),
    "num_layers": Option(3, "linear layers of the partition function, at least 1", kind=int),
    "dropout": Option(0.0, "dropout in the partition function while training, from 0 to below 1", kind=float),
    "detach_hidden": Option(
        False, "keep the partition function's gradient away from the policy's hidden states", kind=bool
    ),
    "lr": Option(None, "learning rate of the partition function; the actor's if unset", kind=float),
    "weight_decay": Option(None, "weight decay of the partition function; the actor's if unset", kind=float),
}


@dataclass(frozen=True)
class Choices:
    """All options of the family, each in its range; see `OPTIONS` for what they mean."""

    beta: float
    length: str
    weight: str
    weight_cap: float | None
    num_layers: int
    dropout: float
    detach_hidden: bool
    lr: float | None
    weight_decay: float | None


def problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What is out of range, each with its name and value."""
    for name, wanted, fits in (
        ("beta", "a number above 0", lambda value: 0 < value < math.inf),
        ("num_layers", "1 or more", lambda value: value >= 1),
        ("dropout", "from 0 to below 1", lambda value: 0 <= value < 1),
    ):
        if values[name] is None or not fits(values[name]):
            yield f"{name}={values[name]} (must be {wanted})"
    for name, least in (("weight_cap", "above 0"), ("lr", "above 0"), ("weight_decay", "0 or more")):
        value = values[name]
        if value is not None and not (0 < value < math.inf or (name == "weight_decay" and value == 0)):
            yield f"{name}={value} (must be {least})"
    for name in ("length", "weight"):
        if values[name] not in OPTIONS[name].choices:
            yield f"{name}={values[name]} (must be one of {', '.join(OPTIONS[name].choices)})"


def current() -> Choices:
    """The options in this process.

    Raises:
        PatchError: one is out of its range; all such are named.
    """
    values = dict(engine.options(FAMILY))
    wrong = list(problems(values))
    if wrong:
        raise PatchError(
            f"has options that mean nothing: {'; '.join(wrong)}.",
            patch=FAMILY,
            advice="Correct them under [flowrl] in flashpatch.toml or in enable().",
        )
    return Choices(**values)
