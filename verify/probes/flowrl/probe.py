"""The family's probe: verl's own worker takes one step on a tiny actor, and the paper checks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashpatch.proof import Proof

_PATIENCE = 600.0  # seconds
_TAIL = 1200  # characters of a failed job's log that are shown
_CLOSE = 1e-4  # of float32 in verl against float64, relative


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Start the job as a user's program would be, and weigh what it saw."""
    began = time.monotonic()
    log = workdir / "job.log"
    environment = {**os.environ, "DIST_INIT_METHOD": f"file://{workdir}/meet", "HF_HUB_OFFLINE": "1"}
    code = "from flashpatch.verify.probes.flowrl.job import main; main()"
    with log.open("wb") as file:
        job = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(workdir)],
            env=environment,
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        code_of_exit: int | None = job.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        code_of_exit = None
    finally:
        job.kill()
        job.wait()
    seconds = time.monotonic() - began
    if code_of_exit != 0:
        ended = f"exit {code_of_exit}" if code_of_exit is not None else f"no end within {_PATIENCE:.0f} s"
        evidence = f"{ended}: ...{log.read_text(errors='replace').strip()[-_TAIL:]}"
        return [
            Proof(
                "flowrl", "verl's worker updates an actor with the loss mode flowrl", False, evidence, seconds
            )
        ]
    return _weigh(json.loads((workdir / "seen.json").read_text()), seconds)


def _weigh(seen: Mapping[str, Any], seconds: float) -> list[Proof]:
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
            "what the rollout engine gets is the policy's weights, all of them, and nothing of proj_z",
            seen["exported"] == seen["policy"] and bool(seen["policy"]),
            f"{len(seen['exported'])} names of {len(seen['policy'])}, "
            f"{sum('proj_z' in name for name in seen['exported'])} of proj_z",
        ),
        Proof(
            "flowrl",
            "a Megatron recipe is refused by name",
            "strategy=megatron" in seen["refused"] and "not refused" not in seen["refused"],
            "PatchError before anything started" if seen["refused"] else "it was not",
        ),
    ]
