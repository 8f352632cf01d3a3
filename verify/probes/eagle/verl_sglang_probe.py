"""Prove family eagle through verl if its rollouts are SGLang's and there is no accelerator: verl's own server drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashpatch.patches.eagle.drafter_refit.commands import ACCEPT_LENGTH
from flashpatch.proof import Proof
from flashpatch.verify import processes, verl_sglang_server
from flashpatch.verify.probes.eagle import verl_sglang_job
from flashpatch.verify.probes.eagle.tiny import VOCAB
from flashpatch.verify.probes.eagle.verl_sglang_job import VERSION
from flashpatch.verify.processes import Command

_TIMEOUT = 300.0  # seconds


def is_due() -> bool:
    """Return whether verl is here with SGLang alone, on a CPU; with an accelerator a job shows it, by ``--live``."""
    from flashpatch.patches.cpu import platform

    return find_spec("verl") is not None and find_spec("vllm") is None and platform.accelerator() is None


def probe(workdir: Path) -> Iterator[Proof]:
    """Run verl's server on the target and drafters in ``workdir``, and judge what it answered."""
    verl_sglang_server.write_tokenizer(workdir / "target", VOCAB)
    job = Command("verl", processes.entry_point(verl_sglang_job.__name__, workdir))
    ended = processes.problems(processes.run([job], workdir, _TIMEOUT))
    path = workdir / verl_sglang_job.SEEN
    yield from weigh(json.loads(path.read_text()) if path.exists() else {}, ended)


def weigh(seen: Mapping[str, Any], ended: str) -> Iterator[Proof]:
    """Judge what the job saw."""
    tokens, flushed = seen.get("tokens", {}), seen.get("flushed", {})
    what = "verl's server drafts: tokens do not depend on the drafter"
    problem = seen.get("failed") or ended
    if problem or len(flushed) < 3:
        yield Proof("eagle", what, False, problem or "it gave no answers")
        return
    same = tokens["exact"] == tokens["noise"] == tokens["exact again"]
    count = sum(map(len, tokens["exact"]))
    yield Proof("eagle", what, same and count > 0, f"{len(tokens)} rounds of {count} tokens")
    lengths = [one.get(ACCEPT_LENGTH, 0.0) for one in flushed.values()]
    versions = [one["drafter"] for one in flushed.values()]
    good = min(lengths[0], lengths[2]) > lengths[1] + 0.5 and versions == [0, VERSION + 1, VERSION + 2]
    yield Proof(
        "eagle",
        "drafters sent through verl's server arrive, and its acceptance follows them",
        good,
        f"versions {versions}, acceptance lengths {', '.join(f'{length:.2f}' for length in lengths)}",
    )
