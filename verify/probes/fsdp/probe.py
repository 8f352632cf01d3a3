"""The family's probe: verl's FSDP engines send to verl's receivers, whole and with an accident on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from flashpatch.proof import Proof

PATIENCE = 600.0  # seconds for all processes together
_TAIL = 900  # characters of a failed process's log that are shown
_CLOSE = 1e-5  # of weights after one step, against one process's

VICTIM = "model.layers.1.mlp.down_proj.weight"
PLAN = [
    {"strategy": "fsdp2", "step": True},
    {"strategy": "fsdp2", "tamper": "bit", "victim": VICTIM},
    {"strategy": "fsdp2", "fsdp_size": 1, "step": True},
    {"strategy": "fsdp", "step": True},
    {"strategy": "fsdp", "tamper": "buffer", "victim": VICTIM},
    {"strategy": "fsdp", "fsdp_size": 1, "step": True},
]


def run(workdir: Path, plan: list[dict[str, Any]], world: int = 2, **extra: str) -> str:
    """Carry out a plan of `probe_job` with a trainer and a rollout side per rank; what went wrong, or empty.

    The model is in ``workdir/model``. ``extra`` are environment variables.
    """
    (workdir / "plan.json").write_text(json.dumps(plan))
    (workdir / "meet").unlink(missing_ok=True)
    parts = [(part, rank) for part in ("rollout", "trainer") for rank in range(world)]
    running = [_start(workdir, part, rank, world, extra) for part, rank in parts]
    deadline = time.monotonic() + PATIENCE
    try:
        while any(process.poll() is None for process in running):
            failed = [process for process in running if process.poll()]
            if failed or time.monotonic() > deadline:
                return f"a process failed or was too slow: {_tails(workdir, parts)}"
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return f"a process failed: {_tails(workdir, parts)}" if any(p.returncode for p in running) else ""


def report(workdir: Path, part: str, rank: int) -> list[dict[str, Any]]:
    """What one side saw, by entry of the plan."""
    return json.loads((workdir / f"{part}-{rank}.json").read_text())


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Two ranks under both FSDPs and both meshes, against one process; one flipped bit under each."""
    from flashpatch.verify.probes.fsdp import job

    job.make_model(workdir / "model")
    began = time.monotonic()
    problem = run(workdir, PLAN)
    seconds = time.monotonic() - began
    if problem:
        return [Proof("fsdp", "two ranks send to two rollout workers", False, problem, seconds)]
    return _weigh(workdir, job.plain_step(workdir / "model"), seconds)


def _start(workdir: Path, part: str, rank: int, world: int, extra: dict[str, str]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "DIST_INIT_METHOD": f"file://{workdir}/meet",
        **extra,
    }
    code = "from flashpatch.verify.probes.fsdp.job import main; main()"
    with (workdir / f"{part}-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(workdir), part],
            env=environment,
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _tails(workdir: Path, parts: list[tuple[str, int]]) -> str:
    logs = [(workdir / f"{part}-{rank}.log").read_text(errors="replace").strip() for part, rank in parts]
    return " | ".join(f"...{log[-_TAIL:]}" for log in logs)


def _weigh(workdir: Path, wanted: dict[str, Any], seconds: float) -> list[Proof]:
    import torch

    sides = [report(workdir, "rollout", rank) for rank in range(2)]
    proofs = []
    for number, entry in enumerate(PLAN):
        errors = [side[number]["error"] for side in sides]
        committed = [side[number]["committed"] for side in sides]
        mesh = f"{entry['strategy']}, fsdp_size={entry.get('fsdp_size', -1)}"
        if entry.get("tamper"):
            ok = all(VICTIM in error for error in errors) and not any(committed)
            where = "gathered tensor" if entry["tamper"] == "bit" else "buffer"
            what = f"one bit flipped in the {where} is named"
            proofs.append(Proof("fsdp", f"{what} ({mesh})", ok, errors[0][:160] or "it was loaded"))
            continue
        worst = 0.0
        for rank in range(2):
            got = torch.load(workdir / f"rollout-{rank}-{number}.pt", weights_only=True)
            worst = max(worst, *((got[name] - value).abs().max().item() for name, value in wanted.items()))
        ok = worst < _CLOSE and not any(errors) and all(committed)
        what = f"after a step, both rollout workers have one process's weights ({mesh})"
        proofs.append(Proof("fsdp", what, ok, errors[0] or f"largest difference {worst:.1e}", seconds))
        seconds = 0.0
    return proofs
