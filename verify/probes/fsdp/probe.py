"""Probe family fsdp: verl's FSDP engines send to verl's receivers, unharmed and with a fault in transit.

If its rollouts are SGLang's, an engine answers with what two ranks sent it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flashpatch.verify.probes import jobs
from flashpatch.verify.probes.answers import VOCAB, gap
from flashpatch.verify.proof import Proof

_proof = partial(Proof, "fsdp")
TIMEOUT = 600.0  # seconds for all processes together
_CLOSE = 1e-5  # of weights after one step, against one process's
_CLOSE_LOGPROBS = 1e-3  # of an engine with these

VICTIM = "model.layers.1.mlp.down_proj.weight"
PLAN: list[dict[str, Any]] = [
    {"strategy": "fsdp2", "step": True},
    {"strategy": "fsdp2", "tamper": "bit", "victim": VICTIM},
    {"strategy": "fsdp2", "fsdp_size": 1, "step": True},
    {"strategy": "fsdp", "step": True},
    {"strategy": "fsdp", "tamper": "buffer", "victim": VICTIM},
    {"strategy": "fsdp", "fsdp_size": 1, "step": True},
]
ON_SGLANG = [entry for entry in PLAN if "fsdp_size" not in entry and entry.get("tamper") != "buffer"]


def run(workdir: Path, plan: list[dict[str, Any]], function: str = "rank", **extra: str) -> jobs.Outcome:
    """Carry out a plan of `flashpatch.verify.probes.fsdp.job`, one entry per transfer, on two ranks and the model in ``model``."""
    (workdir / "plan.json").write_text(json.dumps(plan))
    return jobs.run(jobs.ranks(f"fsdp.job:{function}", workdir, environment=extra), workdir, TIMEOUT)


def report(workdir: Path, part: str, rank: int) -> list[dict[str, Any]]:
    """What one side of one rank saw, by entry of the plan."""
    return json.loads((workdir / f"{part}-{rank}.json").read_text())


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Send from two ranks under both FSDPs and both meshes; flip one bit under each FSDP."""
    if jobs.engine_here() == "sglang":
        return list(_on_sglang(workdir))
    from flashpatch.verify.probes.fsdp import job

    job.make_model(workdir / "model")
    ended = run(workdir, PLAN).checked()
    return _weigh(workdir, job.plain_step(workdir / "model").state_dict(), ended.seconds)


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
            proofs.append(_proof(f"{what} ({mesh})", ok, errors[0][:160] or "it was loaded"))
            continue
        worst = 0.0
        for rank in range(2):
            got = torch.load(workdir / f"rollout-{rank}-{number}.pt", weights_only=True)
            apart = [(got[name] - value).abs().max().item() for name, value in wanted.items() if name in got]
            worst = max(worst, *apart) if len(apart) == len(wanted) else float("inf")
        ok = worst < _CLOSE and not any(errors) and all(committed)
        what = f"after a step, both rollout workers have one process's weights ({mesh})"
        proofs.append(_proof(what, ok, errors[0] or f"largest difference {worst:.1e}", seconds))
        seconds = 0.0
    return proofs


def _on_sglang(workdir: Path) -> Iterator[Proof]:
    """Send under both FSDPs, unharmed and with one bit flipped. On a CPU only: with an accelerator that is said."""
    from flashpatch.patches.cpu import platform
    from flashpatch.verify.probes.fsdp import job

    if (found := platform.accelerator()) is not None:
        why = f"not probed beside {found}: run a job, and ask flashpatch-verify --live"
        yield _proof("two ranks send to SGLang", False, why)
        return
    job.make_model(workdir / "model", vocab_size=VOCAB, hidden_size=64, max_position_embeddings=256)
    ended = run(workdir, ON_SGLANG, "on_sglang", SGLANG_USE_CPU_ENGINE="1")
    yield from weigh(ended.seen["rank-0"], ended.problem, ended.seconds)


def weigh(seen: Mapping[str, Any], problem: str, seconds: float = 0.0) -> Iterator[Proof]:
    """Judge what rank 0 saw of SGLang; ``wanted`` in it are the answers with one process's weights after the same step."""
    if problem or "wanted" not in seen:
        yield _proof("two ranks send to SGLang", False, problem or "the transfers did not end", seconds)
        return
    for entry, saw in zip(ON_SGLANG, seen["transfers"], strict=True):
        error = saw["error"]
        if entry.get("tamper"):
            what = (
                f"one bit flipped in the gathered tensor is named by SGLang's scheduler ({entry['strategy']})"
            )
            yield _proof(what, VICTIM in error, error[:240] or "it was loaded")
            continue
        worst, changed = gap(saw["answers"], seen["wanted"]), saw["answers"] != seen["before"]
        what = f"after a step, SGLang answers as with one process's weights ({entry['strategy']})"
        said = f"log-probabilities differ by {worst:.1e} at most; {'' if changed else 'not '}changed"
        yield _proof(what, not error and changed and worst < _CLOSE_LOGPROBS, error or said, seconds)
        seconds = 0.0
