"""Define the family's options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashpatch import engine
from flashpatch.record import Option

FAMILY = "flowrl"

LOG_Z = "log_z"
"""The partition function's output, among those of the actor's forward."""

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
    "log_z": Option(
        "learned",
        "log Z of a prompt: learned (as in the paper) by the partition function, or group, estimated from the "
        "prompt's own responses, without a partition function",
        ("learned", "group"),
    ),
    "reward": Option(
        "advantage",
        "reward in the residual: advantage (as in the paper), which grpo normalises in the group, or raw",
        ("advantage", "raw"),
    ),
    "paper": Option(
        False,
        "take the paper's settings, of this family and of verl if the command line names no others",
        kind=bool,
    ),
}

PAPER = {
    "beta": 15.0,
    "length": "mean",
    "weight": "clip",
    "weight_cap": None,
    "num_layers": 3,
    "dropout": 0.1,
    "detach_hidden": False,
    "lr": None,
    "weight_decay": None,
    "log_z": "learned",
    "reward": "advantage",
}
"""The paper's options. Dropout is of the published code."""

LEARNED_ONLY = ("num_layers", "dropout", "detach_hidden", "lr", "weight_decay")
"""Options of the partition function, which there is none of with ``log_z = "group"``."""


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
    log_z: str
    reward: str
    paper: bool
    diversity_prompts: int


def current() -> Choices:
    """Return the options in this process; with ``paper``, the paper's.

    Raises:
        PatchError: the family was never on in this process.
    """
    chosen = engine.options(FAMILY)
    return Choices(**{**chosen, **(PAPER if chosen["paper"] else {})})


def contradictions() -> Iterator[str]:
    """Yield the options in this process that contradict one another, each with the reason."""
    chosen = engine.options(FAMILY)
    changed = {name: value for name, value in chosen.items() if value != OPTIONS[name].default}
    for name, value in changed.items():
        if chosen["paper"] and name in PAPER and value != PAPER[name]:
            yield f"{name}={value!r} with paper=True (the paper has {PAPER[name]!r})"
        elif chosen["log_z"] == "group" and name in LEARNED_ONLY:
            yield f"{name}={value!r} with log_z='group' (there is no partition function)"
