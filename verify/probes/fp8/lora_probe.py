"""Probe LoRA adapters: send three in turn to an engine whose base was updated, and compare with fresh engines.

On vLLM, or on SGLang where that alone is installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch.proof import Proof
from flashpatch.verify import processes
from flashpatch.verify.probes.fp8 import lora_job, sglang_job, sglang_lora_job, tiny
from flashpatch.verify.processes import Command

if TYPE_CHECKING:
    import numpy

_NAME = "lora"
_TIMEOUT = 300.0  # seconds for both processes together
_SHARE = 0.1  # of what an adapter changes: rounding the merged weights to bf16 may change so much
_ONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True)
class Seen:
    """Hold what the engines answered.

    Attributes:
        problem: why they did not; empty if they did.
        found: logprobs by the name of the adapter or base, with ``fresh-`` before it those of an engine that was opened on it.
        bad: how an adapter that does not fit was refused.
        scored: the part of an array that does not depend on what was sampled.
    """

    problem: str = ""
    found: Mapping[str, numpy.ndarray] = field(default_factory=dict)
    bad: str = ""
    scored: Any = ()


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run both processes, then judge what they saved."""
    if find_spec("vllm") is not None:
        run = _on_vllm
    elif find_spec("sglang") is not None:
        run = _on_sglang
    else:
        return [Proof(_NAME, "adapters of an engine", False, "neither vLLM nor SGLang is installed")]
    lora_job.write(workdir)
    seen = run(workdir)
    if seen.problem:
        return [Proof(_NAME, "both engines answer", False, seen.problem)]
    return list(_judged(seen))


def _on_vllm(workdir: Path) -> Seen:
    import numpy

    environment = {**tiny.ENVIRONMENT, **_ONE}
    job = Command("job", processes.entry_point(lora_job.__name__, workdir), environment)
    fresh = Command("fresh", [lora_job.__file__, str(workdir)], environment, stock=True, stops_others=False)
    problem = processes.problems(processes.run([job, fresh], workdir, _TIMEOUT))
    if problem:
        return Seen(problem)
    found = {path.stem: numpy.load(path) for path in workdir.glob("*.npy")}
    return Seen(found=found, bad=json.loads((workdir / "seen.json").read_text())["bad"])


def _on_sglang(workdir: Path) -> Seen:
    import numpy

    job, fresh = (
        Command(name, processes.entry_point(sglang_lora_job.__name__, name, workdir), stock=name == "fresh")
        for name in ("job", "fresh")
    )
    problem = processes.problems(processes.run([job, fresh], workdir, _TIMEOUT))
    files = [workdir / f"{one.name}.json" for one in (job, fresh)]
    seen, stock = (json.loads(file.read_text()) if file.exists() else {} for file in files)
    failed = next((one["failed"] for one in (seen, stock) if "failed" in one), "")
    if failed or problem:
        return Seen(failed or problem)
    found = {name: numpy.array(rows) for name, rows in seen["answers"].items()}
    found |= {f"fresh-{name}": numpy.array(rows) for name, rows in stock["answers"].items()}
    found[lora_job.MERGED] = found.pop(f"fresh-{lora_job.MERGED}")
    return Seen(found=found, bad=seen["bad"], scored=(slice(None), slice(-sglang_job.TOKENS)))


def _judged(seen: Seen) -> Iterator[Proof]:
    import numpy

    found, scored = seen.found, seen.scored
    for name in lora_job.ADAPTERS:
        yield _equal(f"adapter {name}, sent to a running engine, equals a fresh engine with it", found, name)
    yield _equal("the base, updated beside adapters, equals a fresh engine on it", found, "base")
    last = lora_job.ADAPTERS[-1]
    effect, rounding = (
        float(numpy.abs(found[last][scored] - found[other][scored]).mean())
        for other in ("base", lora_job.MERGED)
    )
    yield Proof(
        _NAME,
        "an adapter does what merging it into the weights does",
        0 < effect and rounding < _SHARE * effect,
        f"logprobs off by {rounding:.2g} on average, of {effect:.2g} that the adapter changes",
    )
    kept = numpy.array_equal(found["kept"], found[last])
    yield Proof(
        _NAME,
        "an adapter that does not fit is refused by name, and the one before stays",
        "lora_A is" in seen.bad and kept,
        seen.bad.partition("\n")[0] or "it was taken",
    )


def _equal(what: str, found: Mapping[str, numpy.ndarray], name: str) -> Proof:
    import numpy

    fresh = found[f"fresh-{name}"]
    gap = float(numpy.abs(found[name] - fresh).max())
    return Proof(
        _NAME, what, numpy.array_equal(found[name], fresh), f"largest difference of logprobs {gap:g}"
    )
