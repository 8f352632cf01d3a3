"""Probe family fsdp: verl's FSDP engines send to verl's receivers, unharmed and with a fault in transit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from flashpatch.proof import Proof
from flashpatch.verify import processes
from flashpatch.verify.probes import calls
from flashpatch.verify.processes import Command

TIMEOUT = 600.0  # seconds for all processes together
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
    """Carry out a plan of `flashpatch.verify.probes.fsdp.job` with a trainer and its rollout worker per rank.

    Args:
        workdir: holds the model in ``model``.
        plan: what to send, one entry per transfer.
        world: number of ranks.
        extra: environment variables.

    Returns:
        What went wrong, or an empty string.
    """
    (workdir / "plan.json").write_text(json.dumps(plan))
    commands = [
        Command(
            f"rank-{rank}",
            processes.entry_point("flashpatch.verify.probes.fsdp.job", workdir),
            {**environment, **extra},
        )
        for rank, environment in enumerate(processes.rank_environments(workdir, world))
    ]
    return processes.problems(processes.run(commands, workdir, TIMEOUT))


def report(workdir: Path, part: str, rank: int) -> list[dict[str, Any]]:
    """What one side of one rank saw, by entry of the plan."""
    return json.loads((workdir / f"{part}-{rank}.json").read_text())


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Send from two ranks under both FSDPs and both meshes; flip one bit under each FSDP."""
    from flashpatch.verify.probes.fsdp import job

    job.make_model(workdir / "model")
    began = time.monotonic()
    problem = run(workdir, PLAN)
    seconds = time.monotonic() - began
    if problem:
        return [Proof("fsdp", "two ranks send to two rollout workers", False, problem, seconds)]
    return [
        *_weigh(workdir, job.plain_step(workdir / "model"), seconds),
        calls.counted(nonce, "fsdp.verl", {"trainer": ("get_per_tensor_param", "get_sharding_strategy")}),
        calls.counted(nonce, "fsdp.verl_vllm", {"worker": ("receive_weights",)}),
    ]


def _weigh(workdir: Path, wanted: dict[str, Any], seconds: float) -> list[Proof]:
    """Judge what the rollout workers received; ``wanted`` are one process's weights after the same step."""
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
            apart = [(got[name] - value).abs().max().item() for name, value in wanted.items() if name in got]
            worst = max(worst, *apart) if len(apart) == len(wanted) else float("inf")
        ok = worst < _CLOSE and not any(errors) and all(committed)
        what = f"after a step, both rollout workers have one process's weights ({mesh})"
        proofs.append(Proof("fsdp", what, ok, errors[0] or f"largest difference {worst:.1e}", seconds))
        seconds = 0.0
    return proofs
