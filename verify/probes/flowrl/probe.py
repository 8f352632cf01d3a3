"""Probe family flowrl: verl's own worker takes one step on a tiny actor, alone and as two ranks that share every row (Ulysses),
without the accelerator; the paper's formulas check it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flashpatch.verify.probes import jobs
from flashpatch.verify.proof import Proof

_proof = partial(Proof, "flowrl")
_TIMEOUT = 600.0  # seconds
_NO_ACCELERATOR = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
_CLOSE = 1e-4  # of float32 in verl against float64, relative


def probe(nonce: str, workdir: Path) -> list[Proof]:
    commands = [
        jobs.job("flowrl.job:alone", workdir),
        *jobs.ranks("flowrl.job:shared", workdir, environment=_NO_ACCELERATOR),
    ]
    ended = jobs.run(commands, workdir, _TIMEOUT).checked()
    return [*_weigh(ended.seen["job"], ended.seconds), _compare(ended.seen["job"], ended.ranks[0])]


def _weigh(seen: Mapping[str, Any], seconds: float) -> Iterator[Proof]:
    policy = {name: value for name, value in seen["moved"].items() if "proj_z" not in name}
    head = {name: value for name, value in seen["moved"].items() if "proj_z" in name}
    least = min([*head.values(), *policy.values()], default=0.0)
    learned = seen["learned"]
    yield _proof(
        "gradients reach every weight of proj_z and of the policy"
        if learned
        else "gradients reach every weight of the policy, which has no proj_z",
        bool(head) == learned and bool(policy) and least > 0,
        f"{len(head)} and {len(policy)} weights, the least moved by {least:.1e}",
        seconds,
    )
    losses = seen["loss"], seen["paper_loss"]
    yield _equal("the loss is the paper's, computed in float64 without verl", *losses)
    if learned:
        said = seen["log_z"], seen["paper_log_z"]
        yield _equal("log Z is that of the prompts' mean last hidden states", *said)
    pairs = list(zip(seen["advantages"], seen["paper_advantages"], strict=True))
    furthest = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    yield _equal("the driver's advantages are what reward and log_z say", *furthest)
    yield _proof(
        "the rollout engine gets all of the policy's weights and nothing of proj_z",
        seen["exported"] == seen["policy"] and bool(seen["policy"]),
        f"{len(seen['exported'])} names of {len(seen['policy'])}, "
        f"{sum('proj_z' in name for name in seen['exported'])} of proj_z",
    )
    yield _adapters(seen, head)


def _adapters(seen: Mapping[str, Any], head: Mapping[str, float]) -> Proof:
    """Judge the step of LoRA adapters, which start at zero: proj_z takes the step it takes without them."""
    step = seen["adapters"]
    own = {name.rpartition("proj_z")[2]: value for name, value in step["moved"].items() if "proj_z" in name}
    wanted = {name.rpartition("proj_z")[2]: value for name, value in head.items()}
    learning = [value for name, value in step["moved"].items() if "lora_B" in name]
    same = set(own) == set(wanted) and all(_close(own[name], value) for name, value in wanted.items())
    return _proof(
        "LoRA adapters learn, proj_z as without them, and the rollout engine gets merged weights",
        same and min(learning, default=0.0) > 0 and step["exported"] == seen["policy"],
        f"{len(learning)} adapters, {len(own)} weights of proj_z, {len(step['exported'])} names exported",
    )


def _equal(what: str, found: float, wanted: float) -> Proof:
    return _proof(what, _close(found, wanted), f"{found:.6f} and {wanted:.6f}")


def _close(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= _CLOSE * max(1.0, abs(wanted))


def _compare(seen: Mapping[str, Any], shared: Mapping[str, Any]) -> Proof:
    """Judge whether ranks that share every row took the step of one rank."""
    numbers = ("loss", "log_z") if seen["learned"] else ("loss",)
    found, wanted = ({**{name: one[name] for name in numbers}, **one["moved"]} for one in (shared, seen))
    differences = {name: abs(found[name] - one) / max(abs(one), 1e-3) for name, one in wanted.items()}
    most = max(differences, key=lambda name: differences[name])
    return _proof(
        "two ranks that share every row (Ulysses) take the same step as one",
        differences[most] <= _CLOSE,
        f"{' and '.join(numbers)}, and the steps of {len(seen['moved'])} weights; furthest apart {most}, by {differences[most]:.1e}",
    )
