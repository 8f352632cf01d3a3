"""Probe family fp8 on vLLM: update a tiny engine in processes of its own, and compare its answers.

Two processes are started. `flashpatch.verify.probes.fp8.vllm_job` carries FlashPatch as a user's program would: it
opens an engine on model A, updates it to A, to B and back through three entry points, and writes down what it
sees. `flashpatch.verify.probes.fp8.tiny`, run as a script without FlashPatch, is the fresh engine on B.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.patches.fp8.vllm import int8_config
from flashpatch.proof import Proof
from flashpatch.settings import selections
from flashpatch.verify import due, processes
from flashpatch.verify.probes.fp8 import tiny, vllm_job
from flashpatch.verify.processes import Command

if TYPE_CHECKING:
    import numpy

_TIMEOUT = 300.0  # seconds for both processes together

_NARROW = ("float8", "float4", "int8", "uint8", "int4", "uint4")  # dtypes that mean quantized

#: Updates in order: what each shows, and whose answers it must give.
_STEPS = {
    "identity": ("an update to the same weights changes nothing", "before"),
    "perturbation": ("an update to other weights equals a fresh engine on them", "fresh"),
    "return": ("reload_weights back equals the answers before", "before"),
}

#: Patches that the job must have called beside those that are due by their records, by role.
_MORE: Mapping[str, Sequence[str]] = {
    "driver": ("create_engine_config",),
    "engine-core": ("engine_core_init", "collective_rpc"),
    "worker": (
        "initialize_model",
        "worker_load_model",
        "process_weights_after_loading",
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
    ),
}


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run both processes, then judge what they saw and what the ledger holds under ``nonce``."""
    tiny.write(workdir / "a", seed=1)
    fresh = tiny.write(workdir / "b", seed=2)
    if _precision() == "int8":  # stock vLLM does not round: its checkpoint is
        fresh = tiny.round_to_int8(fresh, workdir / "b-int8", int8_config.configuration())
    ended = _run(workdir, fresh)
    seen = _read(workdir / "seen.json")
    return [
        _opened(seen, ended, _precision()),
        *_updates(workdir, seen, ended),
        _addresses(seen),
        *_spans(seen),
        _written(seen, nonce),
    ]


# -- the two processes ---------------------------------------------------------------------------------


def _run(workdir: Path, fresh: Path) -> dict[str, str]:
    """Run the job and the fresh engine at the same time; return how each failed, empty for success."""
    paths = [str(workdir / name) for name in ("keywords.json", "fresh.npy")]
    job = Command(
        "job",
        processes.entry_point(vllm_job.__name__, workdir),
        {**tiny.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    stock = Command(
        "fresh",
        [tiny.__file__, str(fresh), *paths],
        {**tiny.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        stock=True,
        stops_others=False,
    )
    endings = processes.run([job, stock], workdir, _TIMEOUT)
    return {name: ending.problem for name, ending in endings.items()}


# -- what they saw -------------------------------------------------------------------------------------


def _proof(what: str, problem: str, evidence: str = "", seconds: float = 0.0) -> Proof:
    return Proof("fp8", what, not problem, problem or evidence, seconds)


def _opened(seen: Mapping[str, Any], ended: Mapping[str, str], precision: str) -> Proof:
    what = f"an engine opens, and its parameters are those of {precision}"
    if not seen.get("looks"):
        return _proof(what, _why(seen, ended))
    kinds = Counter(tensor["dtype"] for tensor in seen["looks"][0].values())
    kernels: Mapping[str, int] = seen.get("kernels", {})
    # A kernel may keep its weights where no parameter shows them, as vLLM's int8 on a CPU does.
    is_narrow = any(kind.startswith(_NARROW) for kind in kinds) or any(
        "Int8" in kernel or "TorchAO" in kernel for kernel in kernels
    )
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    evidence = f"quantization {seen['quantization']}: {counted}"
    if precision.startswith("int8"):
        evidence += f"; {', '.join(f'{count} {kernel}' for kernel, count in kernels.items())}"
    wrong = is_narrow == (precision == "bf16")
    wrong |= precision == "int8" and not (kernels and all("Int8" in kernel for kernel in kernels))
    problem = evidence if wrong else ""
    return _proof(what, problem, evidence, _spent(seen, "before"))


def _updates(workdir: Path, seen: Mapping[str, Any], ended: Mapping[str, str]) -> Iterator[Proof]:
    import numpy

    answers = {path.stem: numpy.load(path) for path in workdir.glob("*.npy")}
    reached = bool(seen.get("looks"))
    for step, (what, reference) in _STEPS.items():
        if step not in answers:
            yield _proof(what, _why(seen, ended) if reached else "not reached")
            reached = False
        elif reference not in answers:
            yield _proof(what, ended[reference] or "the fresh engine saved no answers")
        else:
            found = _compare(answers[step], answers[reference], answers["before"], reference)
            yield _proof(what, *found, _spent(seen, step))


def _why(seen: Mapping[str, Any], ended: Mapping[str, str]) -> str:
    """Why the job went no further."""
    return seen["failed"]["error"] if "failed" in seen else ended["job"]


def _compare(got: numpy.ndarray, wanted: numpy.ndarray, before: numpy.ndarray, name: str) -> tuple[str, str]:
    """Problem, or empty, and evidence. Equal means every bit, and no NaN."""
    import numpy

    if got.shape != wanted.shape:
        return f"answers have shape {got.shape}, those of {name} {wanted.shape}", ""
    gap, moved = numpy.abs(got - wanted).max(), numpy.abs(got - before).max()
    evidence = f"{got.size} logprobs, largest difference {gap:.3g} to {name}"
    if name != "before":
        evidence += f", {moved:.3g} to before"
    ok = bool((got == wanted).all()) and (name == "before" or moved > 0)
    return "" if ok else evidence, evidence


def _addresses(seen: Mapping[str, Any]) -> Proof:
    what = "every parameter and buffer keeps its object and address"
    first, *later = seen.get("looks") or [{}]
    if not later:
        return _proof(what, "no update went through")
    moved = [name for name, tensor in first.items() if any(_at(look, name) != tensor["at"] for look in later)]
    problem = f"{len(moved)} of {len(first)} moved: {', '.join(moved[:4])}" if moved else ""
    return _proof(what, problem, f"{len(first)} tensors, {len(later)} updates")


def _spans(seen: Mapping[str, Any]) -> Iterator[Proof]:
    """vLLM's own version spans, from 0.32 on: the version of each answer, told by another than FlashPatch."""
    told = seen.get("spans") or [None]
    if told[0] is None:
        return
    versions = ["default", *(f"flashpatch-{number}" for number in range(1, len(told)))]
    wrong = [
        f"{spans} after {number} updates"
        for number, (spans, version) in enumerate(zip(told, versions, strict=True))
        if {span[0] for span in spans or ()} != {version}
    ]
    yield _proof(
        "vLLM's own version spans name the policy of each answer", "; ".join(wrong), ", ".join(versions)
    )


def _written(seen: Mapping[str, Any], nonce: str) -> Proof:
    """The processes that were seen at work wrote their rows, and the patches were called in them."""
    what = "the ledger shows the calls in driver, engine core and worker"
    pids = seen.get("pids")
    if not pids:
        return _proof(what, "no engine was seen at work")
    rows = {row.pid: row for run in ledger.read() if run.id == nonce for row in run.rows}
    problems, evidence = [], []
    for role, more in _MORE.items():
        row = rows.get(pids[role])
        if row is None:
            problems.append(f"{role} {pids[role]} wrote no row under the nonce")
            continue
        if role not in row.roles:
            problems.append(f"process {row.pid} does not know that it is the {role}")
        idle = due.not_called([row], list(rows.values()), "fp8.vllm", role, _options(), more)
        problems += [f"{names} was never called in {role} {row.pid}" for names in idle]
        evidence.append(f"{role} {row.pid}: {sum(entry['calls'] for entry in row.patches.values())} calls")
    return _proof(what, "; ".join(problems), ", ".join(evidence))


def _at(look: Mapping[str, Any], name: str) -> list[int] | None:
    return look[name]["at"] if name in look else None


def _spent(seen: Mapping[str, Any], step: str) -> float:
    return seen["seconds"].get(step, 0.0)


def _precision() -> str:
    return _options()["precision"]


def _options() -> Mapping[str, Any]:
    return selections.from_environment(selections.NOTHING).choices["fp8"].options


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
