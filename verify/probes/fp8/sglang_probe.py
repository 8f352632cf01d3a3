"""Probe family fp8 on SGLang: update an engine in processes of its own, and compare its answers.

As on vLLM: one process carries FlashPatch and goes from model A to A, to B in buckets that cut every fused layer,
and back to A from disk; another, without FlashPatch, opens B. Where verl is installed too, and no accelerator is there,
verl's own server goes from A to B and back by weights of verl's own client, and another one opens B; with an accelerator
these need a job, which ``flashpatch-verify --live`` judges.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashpatch import ledger, registry
from flashpatch.arming.preflight import other_generation
from flashpatch.proof import Proof
from flashpatch.settings import selections
from flashpatch.verify import due, processes, verl_sglang_server
from flashpatch.verify.probes.fp8 import sglang_job, tiny, verl_sglang_job
from flashpatch.verify.processes import Command

_TIMEOUT = 400.0  # seconds for both processes together

#: What the job does, what that shows, and whose answers it must give.
_STEPS = {
    "identity": ("an update to the same weights changes nothing", "before"),
    "perturbation": ("an update to other weights equals a fresh engine on them", "fresh"),
    "return": ("update_weights_from_disk back equals the answers before", "before"),
}
#: The same through verl.
_VERL_STEPS = {
    "identity": ("verl sends the same weights, which changes nothing", "fresh"),
    "perturbation": ("weights that verl sends equal a fresh server of verl's on them", "fresh"),
    "return": ("weights that verl sends back equal the answers before", "before"),
}
#: Patches that the job must have called beside those that are due by their records, by generation and role.
_MORE: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang": {
        "driver": ("run_resolution_pipeline", "launch_scheduler_processes"),
        "engine-core": ("scheduler_init", "begin_weight_update", "end_weight_update"),
        "worker": (
            "initialize_model",
            "load_model",
            "postprocess_weights",
            "update_weights_from_tensor",
            "runner_update_weights_from_disk",
        ),
    },
    "sglang_0_5_12": {
        "driver": ("server_args_post_init", "launch_scheduler_processes"),
        "engine-core": ("scheduler_init", "update_weights_from_tensor", "update_weights_from_disk"),
        "worker": (
            "initialize_model",
            "load_model",
            "load_weights_and_postprocess",
            "runner_update_weights_from_tensor",
            "runner_update_weights_from_disk",
        ),
    },
}


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run both processes, then judge what they saw and what the ledger holds under ``nonce``."""
    tiny.write(workdir / "a", seed=1)
    tiny.write(workdir / "b", seed=2)
    ended = _run(workdir)
    seen = {name: _read(workdir / f"{name}.json") for name in ("job", "fresh")}
    proofs = [*_updates(seen, ended), _written(nonce)]
    return [*proofs, *_through_verl(workdir)] if _verl_is_here() else proofs


def _verl_is_here() -> bool:
    from flashpatch.patches.cpu import platform

    return find_spec("verl") is not None and platform.accelerator() is None


def _through_verl(workdir: Path) -> Iterator[Proof]:
    """Run verl's servers and client, and judge what they answered."""
    for name in ("a", "b"):
        verl_sglang_server.write_tokenizer(workdir / name, tiny.VOCAB)
    job = Command("verl", processes.entry_point(verl_sglang_job.__name__, workdir))
    ended = processes.problems(processes.run([job], workdir, _TIMEOUT))
    yield from _weigh_verl(_read(workdir / verl_sglang_job.SEEN), ended)


def _weigh_verl(seen: Mapping[str, Any], ended: str) -> Iterator[Proof]:
    answers = seen.get("answers", {})
    problem = seen.get("failed") or ended
    yield _proof(
        "verl's servers open and answer", "" if "fresh" in answers else problem or "they gave no answers"
    )
    yield from _compare(_VERL_STEPS, answers, answers, problem, problem)
    receipts = seen.get("receipts", [])
    workers = [worker for one in receipts for worker in one["workers"] or ()]
    ready = (
        len(receipts) == len(_VERL_STEPS) and all(one["states"] == ["ready"] for one in workers) and workers
    )
    evidence = f"{len(receipts)} receipts of {sum(one['tensors'] for one in workers)} tensors"
    yield _proof(
        "verl's client gets a receipt of every worker", "" if ready else problem or evidence, evidence
    )


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
    failed = seen["job"].get("failed") or ended["job"]
    yield from _compare(_STEPS, job, answers, failed, ended["fresh"] or "the fresh engine gave no answers")


def _compare(
    steps: Mapping[str, tuple[str, str]],
    job: Mapping[str, Any],
    answers: Mapping[str, Any],
    failed: str,
    no_reference: str,
) -> Iterator[Proof]:
    """Compare the answers after each step of a job with those that they must equal."""
    for step, (what, reference) in steps.items():
        got, wanted = answers.get(step), answers.get(reference)
        if got is None:
            yield _proof(what, f"not reached: {failed}")
        elif wanted is None:
            yield _proof(what, no_reference)
        else:
            count = sum(map(len, got))
            moved = step != "perturbation" or got != job["before"]
            gap = max(abs(x - y) for a, b in zip(got, wanted) for x, y in zip(a, b))
            evidence = f"{count} numbers, largest difference {gap:.3g} to {reference}"
            yield _proof(what, "" if got == wanted and moved else evidence, evidence)


def _written(nonce: str) -> Proof:
    """The patches were called, in processes that know what they are."""
    rows = [row for run in ledger.read() if run.id == nonce for row in run.rows]
    options = selections.from_environment(selections.NOTHING).choices["fp8"].options
    framework = other_generation(registry.family("fp8").patches, "sglang") or "sglang"
    problems, evidence = [], []
    for role, more in _MORE[framework].items():
        of_role = [row for row in rows if role in row.roles]
        if not of_role:
            problems.append(f"no {role} wrote a row under the nonce")
            continue
        idle = due.not_called(of_role, rows, f"fp8.{framework}", role, options, more)
        problems += [f"{names} was never called in the {role}" for names in idle]
        calls = sum(entry["calls"] for row in of_role for entry in row.patches.values())
        evidence.append(f"{role} {of_role[0].pid}: {calls} calls")
    return _proof(
        "the ledger shows the calls in driver, scheduler and worker", "; ".join(problems), ", ".join(evidence)
    )


def _proof(what: str, problem: str, evidence: str = "") -> Proof:
    return Proof("fp8", what, not problem, problem or evidence, 0.0)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
