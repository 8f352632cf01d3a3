"""The family's probe where SGLang is the engine: an engine takes new weights, and its answers are compared.

As on vLLM: one process carries FlashPatch and goes from model A to A, to B in buckets that cut every fused layer,
and back to A from disk; another has never met FlashPatch and opens B.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.proof import Proof
from flashpatch.verify.probes.fp8 import sglang_job, tiny

_PATIENCE = 400.0  # seconds for both processes together
_TAIL = 700

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
    """Run both processes, then weigh what they saw and what the ledger holds under ``nonce``."""
    tiny.write(workdir / "a", seed=1)
    tiny.write(workdir / "b", seed=2)
    ended = _run(workdir)
    seen = {name: _read(workdir / f"{name}.json") for name in ("job", "fresh")}
    return [*_updates(seen, ended), _written(nonce)]


def _run(workdir: Path) -> dict[str, str]:
    """Both processes at the same time; how each ended, empty for well."""
    code = f"from {sglang_job.__name__} import main; main()"
    keep = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
    running = {}
    for name, environ in (("job", dict(os.environ)), ("fresh", keep)):
        with (workdir / f"{name}.log").open("wb") as log:
            running[name] = subprocess.Popen(
                [sys.executable, "-P", "-c", code, name, str(workdir)],
                env={**environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
                cwd=workdir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    deadline = time.monotonic() + _PATIENCE
    while any(process.poll() is None for process in running.values()) and time.monotonic() < deadline:
        if running["job"].poll():
            break
        time.sleep(0.2)
    endings = {}
    for name, process in running.items():
        status = process.poll()
        how = "did not end in time" if status is None else f"ended with status {status}"
        log = (workdir / f"{name}.log").read_text(errors="replace").strip()
        endings[name] = "" if status == 0 else f"{how}: ...{log[-_TAIL:]}"
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass  # nothing was left
        process.wait()
    return endings


def _updates(seen: Mapping[str, Any], ended: Mapping[str, str]) -> Iterator[Proof]:
    job, fresh = seen["job"].get("answers", {}), seen["fresh"].get("answers", {})
    answers = {**job, "fresh": fresh.get("before")}
    yield _proof("an engine opens and answers", "" if "before" in job else f"the job {ended['job']}")
    for step, (what, reference) in _STEPS.items():
        got, wanted = answers.get(step), answers.get(reference)
        if got is None:
            failed = seen["job"].get("failed") or ended["job"]
            yield _proof(what, f"not reached: {failed}")
        elif wanted is None:
            yield _proof(what, f"the fresh engine {ended['fresh']}")
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
