"""The family's probe: two ranks start as verl's trainers do and take one step under each FSDP."""

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

_PATIENCE = 300.0  # seconds for both ranks together
_TAIL = 700  # characters of a failed rank's log that are shown
_CLOSE = 1e-6


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run two ranks and compare what they saw with one process that never meets FSDP."""
    from flashpatch.patches.cpu import accelerator

    device = accelerator.found()
    if device is not None:
        return [Proof("cpu", "there is no accelerator", False, f"there is {device}: cpu refuses itself")]
    began = time.monotonic()
    problem = _run(workdir)
    seconds = time.monotonic() - began
    if problem:
        return [Proof("cpu", "two ranks start as verl's trainers do", False, problem, seconds)]
    seen = [json.loads((workdir / f"seen-{rank}.json").read_text()) for rank in range(2)]
    return _weigh(seen, seconds)


def _run(workdir: Path) -> str:
    """Run both ranks; what went wrong, or empty."""
    running = [_start(workdir, rank) for rank in range(2)]
    deadline = time.monotonic() + _PATIENCE
    try:
        for process in running:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"no answer within {_PATIENCE:.0f} s: {_tail(workdir)}"
    finally:
        for process in running:
            process.kill()
            process.wait()
    return f"a rank failed: {_tail(workdir)}" if any(process.returncode for process in running) else ""


def _start(workdir: Path, rank: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "DIST_INIT_METHOD": f"file://{workdir}/meet",
    }
    code = "from flashpatch.verify.probes.cpu.job import main; main()"
    with (workdir / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(workdir)],
            env=environment,
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _tail(workdir: Path) -> str:
    logs = [path.read_text(errors="replace").strip() for path in sorted(workdir.glob("rank-*.log"))]
    return " | ".join(f"...{log[-_TAIL:]}" for log in logs)


def _weigh(seen: list[Mapping[str, Any]], seconds: float) -> list[Proof]:
    from flashpatch.verify.probes.cpu import job

    first, wanted = seen[0], job.plain()
    proofs = [
        Proof(
            "cpu",
            "verl chooses the CPU, its FSDP engine and vLLM's CPU build",
            first["platform"] == "cpu" and first["engine"].startswith("FSDP") and bool(first["vllm"]),
            f"{first['platform']}, {first['engine']}, vllm {first['vllm']}",
            seconds,
        ),
        Proof(
            "cpu",
            "a recipe with LoRA is refused by name",
            "lora_rank=8" in first["refused"],
            "PatchError before anything started" if first["refused"] else "it was not",
        ),
    ]
    for kind in ("fsdp", "fsdp2"):
        worst = max(abs(got - want) for rank in seen for got, want in zip(rank[kind], wanted, strict=True))
        what = f"a step of two ranks under {kind} equals one process's on the whole batch"
        proofs.append(Proof("cpu", what, worst < _CLOSE, f"largest difference {worst:.1e}"))
    return proofs
