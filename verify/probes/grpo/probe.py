"""The family's probe: two ranks step verl's own engines, and verl's client meets a dead server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashpatch.proof import Proof

RANKS = 2
_PATIENCE = 400.0  # seconds for all ranks together
_TAIL = 900  # characters of a failed rank's log that are shown
_CLOSE = 1e-5  # of the gradient's norm: float32, summed in another order
_REQUESTS = 40


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the ranks and weigh what they saw."""
    began = time.monotonic()
    problem = run(workdir)
    seconds = time.monotonic() - began
    if problem:
        return [Proof("grpo", "two ranks train with verl's engines", False, problem, seconds)]
    return _weigh([json.loads((workdir / f"seen-{rank}.json").read_text()) for rank in range(RANKS)], seconds)


def run(workdir: Path) -> str:
    """Run `flashpatch.verify.probes.grpo.job` on all ranks; what went wrong, or empty."""
    port = _free_port()
    running = [_start(workdir, rank, port) for rank in range(RANKS)]
    deadline = time.monotonic() + _PATIENCE
    try:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                break  # the others would wait for it
            if time.monotonic() > deadline:
                return f"no answer within {_PATIENCE:.0f} s: {_tail(workdir)}"
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return f"a rank failed: {_tail(workdir)}" if any(process.returncode for process in running) else ""


def _start(workdir: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DIST_INIT_METHOD": f"file://{workdir}/meet",
    }
    code = "from flashpatch.verify.probes.grpo.job import main; main()"
    with (workdir / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(workdir)],
            env=environment,
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return probe_socket.getsockname()[1]


def _tail(workdir: Path) -> str:
    logs = [path.read_text(errors="replace").strip() for path in sorted(workdir.glob("rank-*.log"))]
    return " | ".join(f"...{log[-_TAIL:]}" for log in logs)


def _weigh(seen: list[Mapping[str, Any]], seconds: float) -> list[Proof]:
    first, proofs = seen[0], []
    for kind in ("fsdp", "fsdp2"):
        ours = [
            away for rank in seen for name, away in rank[kind].items() if ", " in name and "stock" not in name
        ]
        stock = first[kind]["stock, 8 configured"]
        # The comparison is worth something only if it sees a wrong divisor.
        proofs.append(
            Proof(
                "grpo.verl.register_policy_loss",
                f"under {kind} every split gives the gradient of the whole batch",
                bool(ours) and max(ours) < _CLOSE < stock,
                f"{len(ours)} gradients, largest distance {max(ours):.1e}; stock verl's {stock:.2f}",
                seconds,
            )
        )
    proofs.append(
        Proof(
            "grpo.verl.validate_config",
            "a recipe with another loss is refused by name",
            "loss_mode=gspo" in first["refused"],
            "PatchError before anything started" if first["refused"] else "it was not",
        )
    )
    routed = first["routed"]
    proofs.append(
        Proof(
            "grpo.verl.generate",
            "requests of a dead server are answered by others",
            routed["answered"] == _REQUESTS
            and routed["left"] == {"servers": ["one", "two"], "outstanding": 0}
            and sum(routed["served"].values()) == _REQUESTS,
            f"{routed['answered']} of {_REQUESTS}, by {routed['served']}",
        )
    )
    away = first["logprobs"]
    proofs.append(
        Proof("grpo", "log-probabilities from blocks", away < 1e-4, f"{away:.0e} from the plain ones")
    )
    return proofs
