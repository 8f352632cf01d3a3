"""Probe family flowrl: verl's own worker takes one step on a tiny actor; the paper's formulas check it.

Two ranks that share every row (Ulysses) take the same step; they run without the accelerator, of which one machine may
have only one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashpatch.proof import Proof
from flashpatch.verify import processes
from flashpatch.verify.processes import Command

_TIMEOUT = 600.0  # seconds
_NO_ACCELERATOR = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
_CLOSE = 1e-4  # of float32 in verl against float64, relative


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the job as a user's program, and judge what it saw."""
    began = time.monotonic()
    main = processes.entry_point("flashpatch.verify.probes.flowrl.job", workdir)
    commands = [Command("job", main, processes.rank_environments(workdir, 1)[0])]
    (workdir / "ranks").mkdir()
    for rank, environment in enumerate(processes.rank_environments(workdir / "ranks", 2)):
        commands.append(Command(f"rank-{rank}", main, {**environment, **_NO_ACCELERATOR}))
    problem = processes.problems(processes.run(commands, workdir, _TIMEOUT))
    seconds = time.monotonic() - began
    if problem:
        what = "verl's worker updates an actor with the loss mode flowrl"
        return [Proof("flowrl", what, False, problem, seconds)]
    seen, shared = (json.loads((workdir / name).read_text()) for name in ("seen.json", "shared.json"))
    return [*_weigh(seen, seconds), _compare(seen, shared)]


def _weigh(seen: Mapping[str, Any], seconds: float) -> list[Proof]:
    """Judge what the job saw; ``seconds`` is what running it took."""
    loss, wanted = seen["loss"], seen["paper_loss"]
    log_z, wanted_z = seen["log_z"], seen["paper_log_z"]
    head = {name: value for name, value in seen["moved"].items() if "proj_z" in name}
    policy = {name: value for name, value in seen["moved"].items() if "proj_z" not in name}
    least = min([*head.values(), *policy.values()], default=0.0)
    return [
        Proof(
            "flowrl",
            "gradients reach every weight of proj_z and of the policy",
            bool(head) and bool(policy) and least > 0,
            f"{len(head)} and {len(policy)} weights, the least moved by {least:.1e}",
            seconds,
        ),
        Proof(
            "flowrl",
            "the loss is the paper's, computed in float64 without verl",
            abs(loss - wanted) <= _CLOSE * abs(wanted),
            f"{loss:.6f} and {wanted:.6f}",
        ),
        Proof(
            "flowrl",
            "log Z is that of the prompts' mean last hidden states",
            abs(log_z - wanted_z) <= _CLOSE * max(1.0, abs(wanted_z)),
            f"{log_z:.6f} and {wanted_z:.6f}",
        ),
        Proof(
            "flowrl",
            "the rollout engine gets all of the policy's weights and nothing of proj_z",
            seen["exported"] == seen["policy"] and bool(seen["policy"]),
            f"{len(seen['exported'])} names of {len(seen['policy'])}, "
            f"{sum('proj_z' in name for name in seen['exported'])} of proj_z",
        ),
        Proof(
            "flowrl",
            "a Megatron recipe is refused by name",
            "strategy=megatron" in seen["refused"] and "not refused" not in seen["refused"],
            "PatchError before anything started" if seen["refused"] else "it was accepted",
        ),
    ]


def _compare(seen: Mapping[str, Any], shared: Mapping[str, Any]) -> Proof:
    """Judge whether ranks that share every row took the step of one rank."""

    def apart(one: float, other: float) -> float:
        return abs(one - other) / max(abs(other), 1e-3)

    differences = {name: apart(shared[name], seen[name]) for name in ("loss", "log_z")}
    differences |= {name: apart(shared["moved"][name], value) for name, value in seen["moved"].items()}
    most = max(differences, key=lambda name: differences[name])
    return Proof(
        "flowrl",
        "two ranks that share every row (Ulysses) take the same step as one",
        differences[most] <= _CLOSE,
        f"loss, log Z and the steps of {len(seen['moved'])} weights; furthest apart {most}, by {differences[most]:.1e}",
    )
