"""Probe family fp8: update a tiny engine in processes of its own, and compare its answers with a fresh engine's.

One process goes from model a to a, to another in buckets that cut every fused layer, and back to a from disk; another, without
FlashPatch, opens the other model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flashpatch.settings import selections
from flashpatch.verify.probes import answers, jobs
from flashpatch.verify.probes.fp8 import tiny
from flashpatch.verify.proof import Proof

_proof = partial(Proof, "fp8")
_TIMEOUT = 400.0  # seconds for both processes together
_NARROW = ("float8", "float4", "int8", "uint8", "int4", "uint4")  # dtypes that mean quantized

#: Updates in order: what each shows, and whose answers it must give.
_STEPS = {
    "identity": ("an update to the same weights changes nothing", "before"),
    "perturbation": ("an update to other weights equals a fresh engine on them", jobs.FRESH),
    "return": ("{} back equals the answers before", "before"),
}


def probe(nonce: str, workdir: Path) -> list[Proof]:
    chosen = selections.from_environment(selections.NOTHING).choices["fp8"]
    engine, precision = jobs.engine(), chosen.options["precision"]
    for name, seed in (("a", 1), ("b", 2)):
        tiny.write(workdir / name, seed)
    if precision == "int8" and engine.NAME == "vllm":  # stock vLLM does not round: its checkpoint is
        from flashpatch.patches.fp8.vllm import int8_config

        tiny.round_to_int8(workdir / "b", workdir / jobs.FRESH, int8_config.configuration())
    else:
        (workdir / jobs.FRESH).symlink_to(workdir / "b")
    commands = [
        jobs.job("fp8.job:updates", workdir, environment=engine.APART),
        jobs.job("fp8.job:fresh", workdir, jobs.FRESH, engine.IN_ONE),
    ]
    ended = jobs.run(commands, workdir, _TIMEOUT)
    return list(_judged(ended, precision, engine.RELOAD))


def _judged(ended: jobs.Outcome, precision: str, reload: str) -> Iterator[Proof]:
    job, problem = ended.seen["job"], ended.problems["job"]
    yield _opened(job, problem or "it gave no answers", precision)
    found = {**job.get("answers", {}), jobs.FRESH: ended.seen[jobs.FRESH].get("answers")}
    seconds = job.get("seconds", {})
    for step, (what, reference) in _STEPS.items():
        ok, evidence = _updated(step, reference, found)
        if not found.get(step):
            evidence = f"not reached: {problem}"
        elif not found.get(reference):
            evidence = ended.problems[jobs.FRESH] or "the fresh engine gave no answers"
        yield _proof(what.format(reload), ok, evidence, seconds.get(step, 0.0))
    looks = job.get("looks", ())
    if any(looks):
        yield _addresses([look["tensors"] for look in looks])
        yield from _spans([look["spans"] for look in looks])


def _updated(step: str, reference: str, found: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether a step gave the answers of its reference, and the evidence; after the perturbation they must have moved."""
    got, wanted = found.get(step) or (), found.get(reference) or ()
    ok, apart = answers.equal(got, wanted) and bool(got), answers.gap(got, wanted)
    evidence = f"{sum(map(len, got))} logprobs, largest difference {apart:.3g} to {reference}"
    if step == "perturbation":
        moved = answers.gap(got, found.get("before") or ())
        ok, evidence = ok and moved > 0, f"{evidence}, {moved:.3g} to before"
    return ok, evidence


def _opened(job: Mapping[str, Any], problem: str, precision: str) -> Proof:
    what, looks = f"an engine opens, and its parameters are those of {precision}", job.get("looks")
    if not looks:
        return _proof(what, False, problem)
    spent = job["seconds"]["before"]
    if not looks[0]:  # no extension runs on SGLang's workers
        return _proof("an engine opens and answers", True, "", spent)
    kinds = Counter(tensor["dtype"] for tensor in looks[0]["tensors"].values())
    kernels: Mapping[str, int] = looks[0]["kernels"]
    # A kernel may keep its weights where no parameter shows them, as vLLM's int8 on a CPU does.
    narrow = any(kind.startswith(_NARROW) for kind in kinds)
    narrow |= any("Int8" in kernel or "TorchAO" in kernel for kernel in kernels)
    evidence = f"quantization {job['precision']['quantization']}: {_counted(kinds)}"
    evidence += f"; {_counted(kernels)}" if precision.startswith("int8") else ""
    right = narrow == (precision != "bf16")
    if precision == "int8":
        right &= bool(kernels) and all("Int8" in kernel for kernel in kernels)
    return _proof(what, right, evidence, spent)


def _counted(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in numbers.items())


def _addresses(looks: Sequence[Mapping[str, Any]]) -> Proof:
    what = "every parameter and buffer keeps its object and address"
    first, *later = looks
    moved = [one for one in first if any(look.get(one, {}).get("at") != first[one]["at"] for look in later)]
    evidence = f"{len(first)} tensors, {len(later)} updates"
    if moved:
        evidence = f"{len(moved)} of {len(first)} moved: {', '.join(moved[:4])}"
    return _proof(what, bool(later) and not moved, evidence)


def _spans(told: Sequence[Any]) -> Iterator[Proof]:
    """vLLM's own version spans, from 0.32 on: the version of each answer, told by another than FlashPatch."""
    if told[0] is None:
        return
    versions = ["default", *(f"flashpatch-{number}" for number in range(1, len(told)))]
    wrong = [
        f"{spans} after {number} updates"
        for number, (spans, version) in enumerate(zip(told, versions, strict=True))
        if {span[0] for span in spans or ()} != {version}
    ]
    what = "vLLM's own version spans name the policy of each answer"
    yield _proof(what, not wrong, "; ".join(wrong) or ", ".join(versions))
