"""Probe LoRA adapters on vLLM: send three in turn to an engine whose base was updated, and compare with fresh engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from flashpatch.proof import Proof
from flashpatch.verify import processes
from flashpatch.verify.probes.fp8 import lora_job, tiny
from flashpatch.verify.processes import Command

if TYPE_CHECKING:
    import numpy

_NAME = "lora"
_TIMEOUT = 300.0  # seconds for both processes together
_SHARE = 0.1  # of what an adapter changes: rounding the merged weights to bf16 may change so much


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run both processes, then judge what they saved."""
    if find_spec("vllm") is None:
        return [Proof(_NAME, "adapters of an engine", False, "vLLM is not installed")]
    lora_job.write(workdir)
    job = Command("job", processes.entry_point(lora_job.__name__, workdir), {**tiny.ENVIRONMENT, **_ONE})
    fresh = Command(
        "fresh",
        [lora_job.__file__, str(workdir)],
        {**tiny.ENVIRONMENT, **_ONE},
        stock=True,
        stops_others=False,
    )
    endings = processes.run([job, fresh], workdir, _TIMEOUT)
    missing = [one.problem for one in endings.values() if one.problem]
    if missing:
        return [Proof(_NAME, "both engines answer", False, "; ".join(missing))]
    return list(_judged(workdir))


_ONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def _judged(workdir: Path) -> Iterator[Proof]:
    import numpy

    found = {path.stem: numpy.load(path) for path in workdir.glob("*.npy")}
    seen = json.loads((workdir / "seen.json").read_text())
    for name in lora_job.ADAPTERS:
        yield _equal(f"adapter {name}, sent to a running engine, equals a fresh engine with it", found, name)
    yield _equal("the base, updated beside adapters, equals a fresh engine on it", found, "base")
    last = lora_job.ADAPTERS[-1]
    effect, rounding = _mean(found[last], found["base"]), _mean(found[last], found[lora_job.MERGED])
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
        "lora_A is" in seen["bad"] and kept,
        seen["bad"].partition("\n")[0] or "it was taken",
    )


def _equal(what: str, found: dict[str, numpy.ndarray], name: str) -> Proof:
    import numpy

    fresh = found[f"fresh-{name}"]
    gap = float(numpy.abs(found[name] - fresh).max())
    return Proof(
        _NAME, what, numpy.array_equal(found[name], fresh), f"largest difference of logprobs {gap:g}"
    )


def _mean(one: numpy.ndarray, other: numpy.ndarray) -> float:
    import numpy

    return float(numpy.abs(one - other).mean())
