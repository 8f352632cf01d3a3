"""Define the family's options."""

from __future__ import annotations

from dataclasses import dataclass

from flashpatch import engine
from flashpatch.record import Option

FAMILY = "flowrl"

OPTIONS = {
    "beta": Option(15.0, "weight of the reward against the logprobs", kind=float, above=0),
    "length": Option(
        "mean",
        "logprob of a response in the residual: mean over its tokens (as in the paper), or sum",
        ("mean", "sum"),
    ),
    "weight": Option(
        "clip",
        "importance weight of a response: clip (as in the paper; by actor.clip_ratio_low and _high), raw (as "
        "in the published code), or none",
        ("clip", "raw", "none"),
    ),
    "weight_cap": Option(None, "upper bound of the importance weight; none if unset", kind=float, above=0),
    "num_layers": Option(3, "linear layers of the partition function", kind=int, least=1),
    "dropout": Option(0.0, "dropout in the partition function while training", kind=float, least=0, below=1),
    "detach_hidden": Option(
        False, "stop the partition function's gradient before the policy's hidden states", kind=bool
    ),
    "lr": Option(None, "learning rate of the partition function; the actor's if unset", kind=float, above=0),
    "weight_decay": Option(
        None, "weight decay of the partition function; the actor's if unset", kind=float, least=0
    ),
    "diversity_prompts": Option(
        32,
        "prompts per step whose responses are compared for flowrl/diversity/*; 0 for none",
        kind=int,
        least=0,
    ),
}


@dataclass(frozen=True)
class Choices:
    """Hold all options of the family; see `OPTIONS` for their meaning."""

    beta: float
    length: str
    weight: str
    weight_cap: float | None
    num_layers: int
    dropout: float
    detach_hidden: bool
    lr: float | None
    weight_decay: float | None
    diversity_prompts: int


def current() -> Choices:
    """Return the options in this process.

    Raises:
        PatchError: the family was never on in this process.
    """
    return Choices(**engine.options(FAMILY))
