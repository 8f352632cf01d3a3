"""Probe family fp8 on SGLang: update an engine in processes of its own, and compare its answers.

As on vLLM: one process carries FlashPatch and goes from model A to A, to B in buckets that cut every fused layer,
and back to A from disk; another, without FlashPatch, opens B.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.proof import Proof
from flashpatch.verify import processes
from flashpatch.verify.probes.fp8 import sglang_job, tiny
from flashpatch.verify.processes import Command

_TIMEOUT = 400.0  # seconds for both processes together

#: What the job does, what that shows, and whose answers it must give.
_STEPS = {
    "identity": ("an update to the same weights changes nothing", "before"),
    "perturbation": ("an update to other weights equals a fresh engine on them", "fresh"),
    "return": ("update_weights_from_disk back equals the answers before", "before"),
}
#: Patches that the job must have called, by role.
_DUE = {
    "driver": ("run_resolution_pipeline", "launch_scheduler_processes"),
    "engine-core": (
        "scheduler_init",
        "get_next_batch_to_run",
        "begin_weight_update",
        "end_weight_update",
        "scheduler_update_weights_from_disk",
    ),
    "worker": (
        "initialize_model",
        "load_model",
        "restore_weights_before_loading",
        "postprocess_weights",
        "update_weights_from_tensor",
        "runner_update_weights_from_disk",
    ),
}


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run both processes, then judge what they saw and what the ledger holds under ``nonce``."""
    tiny.write(workdir / "a", seed=1)
    tiny.write(workdir / "b", seed=2)
    ended = _run(workdir)
    seen = {name: _read(workdir / f"{name}.json") for name in ("job", "fresh")}
    return [*_updates(seen, ended), _written(nonce)]


def _run(workdir: Path) -> dict[str, str]:
    """Run the job and the fresh engine at the same time; return how each failed, empty for success."""
    job, fresh = (
        Command(
            name,
            processes.entry_point(sglang_job.__name__, name, workdir),
            stock=name == "fresh",
            stops_others=name == "job",
        )
        for name in ("job", "fresh")
    )
    endings = processes.run([job, fresh], workdir, _TIMEOUT)
    return {name: ending.problem for name, ending in endings.items()}


def _updates(seen: Mapping[str, Any], ended: Mapping[str, str]) -> Iterator[Proof]:
    job, fresh = seen["job"].get("answers", {}), seen["fresh"].get("answers", {})
    answers = {**job, "fresh": fresh.get("before")}
    yield _proof(
        "an engine opens and answers", "" if "before" in job else ended["job"] or "it gave no answers"
    )
    for step, (what, reference) in _STEPS.items():
        got, wanted = answers.get(step), answers.get(reference)
        if got is None:
            failed = seen["job"].get("failed") or ended["job"]
            yield _proof(what, f"not reached: {failed}")
        elif wanted is None:
            yield _proof(what, ended["fresh"] or "the fresh engine gave no answers")
        else:
            count = sum(map(len, got))
            moved = reference == "before" or got != answers["before"]
            gap = max(abs(x - y) for a, b in zip(got, wanted) for x, y in zip(a, b))
            evidence = f"{count} logprobs, largest difference {gap:.3g} to {reference}"
            yield _proof(what, "" if got == wanted and moved else evidence, evidence)


def _written(nonce: str) -> Proof:
    """The patches were called, in processes that know what they are."""
    rows = [row for run in ledger.read() if run.id == nonce for row in run.rows]
    problems, evidence = [], []
    for role, due in _DUE.items():
        of_role = [row for row in rows if role in row.roles]
        if not of_role:
            problems.append(f"no {role} wrote a row under the nonce")
            continue
        calls = {id: entry["calls"] for row in of_role for id, entry in row.patches.items() if entry["calls"]}
        problems += [
            f"fp8.sglang.{name} was never called in the {role}"
            for name in due
            if not calls.get(f"fp8.sglang.{name}")
        ]
        evidence.append(f"{role} {of_role[0].pid}: {sum(calls.values())} calls")
    return _proof(
        "the ledger shows the calls in driver, scheduler and worker", "; ".join(problems), ", ".join(evidence)
    )


def _proof(what: str, problem: str, evidence: str = "") -> Proof:
    return Proof("fp8", what, not problem, problem or evidence, 0.0)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
