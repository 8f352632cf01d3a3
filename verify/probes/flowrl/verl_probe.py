"""Probe family flowrl: verl's own worker takes one step on a tiny actor; the paper's formulas check it."""

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
_CLOSE = 1e-4  # of float32 in verl against float64, relative


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the job as a user's program, and judge what it saw."""
    began = time.monotonic()
    main = processes.entry_point("flashpatch.verify.probes.flowrl.job", workdir)
    job = Command("job", main, processes.rank_environments(workdir, 1)[0])
    problem = processes.problems(processes.run([job], workdir, _TIMEOUT))
    seconds = time.monotonic() - began
    if problem:
        what = "verl's worker updates an actor with the loss mode flowrl"
        return [Proof("flowrl", what, False, problem, seconds)]
    return _weigh(json.loads((workdir / "seen.json").read_text()), seconds)


def _weigh(seen: Mapping[str, Any], seconds: float) -> list[Proof]:
    """Judge what the job saw; ``seconds`` is what running it took."""
    loss, wanted = seen["loss"], seen["paper_loss"]
    log_z, wanted_z = seen["log_z"], seen["paper_log_z"]
    head, policy = seen["moved_head"], seen["moved_policy"]
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
