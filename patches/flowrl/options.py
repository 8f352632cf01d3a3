"""Define the family's options."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

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
}

LEARNED_ONLY = ("num_layers", "dropout", "detach_hidden", "lr", "weight_decay")
"""Options of the partition function, which there is none of with ``log_z = "group"``."""


def current() -> SimpleNamespace:
    """Return the options in this process as attributes; see `OPTIONS` for their meaning. Raises PatchError if the
    family was never on in this process."""
    return SimpleNamespace(**engine.options(FAMILY))


def contradictions() -> Iterator[str]:
    """Yield the options in this process that contradict one another, each with the reason."""
    chosen = engine.options(FAMILY)
    for name in LEARNED_ONLY if chosen["log_z"] == "group" else ():
        if chosen[name] != OPTIONS[name].default:
            yield f"{name}={chosen[name]!r} with log_z='group' (there is no partition function)"
