"""Probe family cpu: two ranks start as verl's trainers do and take one step under each FSDP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flashpatch.verify.probes import jobs
from flashpatch.verify.proof import Proof

_proof = partial(Proof, "cpu")
_TIMEOUT = 300.0  # seconds for both ranks together
_SGLANG = {"SGLANG_USE_CPU_ENGINE": "1"}  # as the family sets it for a job whose rollouts are SGLang's
_CLOSE = 1e-6  # largest difference of weights after one step


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run two ranks and compare what they saw with one process without FSDP."""
    from flashpatch.patches.cpu import platform
    from flashpatch.verify.probes.fsdp import job

    device = platform.accelerator()
    if device is not None:
        return [_proof("there is no accelerator", False, f"there is {device}: cpu refuses itself")]
    job.make_model(workdir / "model")
    ended = jobs.run(jobs.ranks("cpu.job:rank", workdir, environment=_SGLANG), workdir, _TIMEOUT).checked()
    return list(_weigh(ended.ranks, ended.seconds))


def _weigh(seen: list[Mapping[str, Any]], seconds: float) -> Iterator[Proof]:
    first = seen[0]
    yield _proof(
        "verl chooses the CPU, its FSDP engine and the rollout engine's CPU build",
        first["platform"] == "cpu" and first["engine"].startswith("FSDP") and bool(first["rollout"]),
        f"{first['platform']}, {first['engine']}, {first['rollout'] or 'no rollout engine on a CPU'}",
        seconds,
    )
    yield _proof(
        "a critic with LoRA is refused by name",
        all("critic.model.lora_rank=8" in error for error in first["refused"]),
        f"{sum(map(bool, first['refused']))} of {len(first['refused'])} times, before anything started",
    )
    for kind in ("fsdp", "fsdp2"):
        worst = max(rank[kind] for rank in seen)
        what = f"a step of two ranks under {kind} equals one process's on the whole batch"
        yield _proof(what, worst < _CLOSE, f"largest difference {worst:.1e}")
