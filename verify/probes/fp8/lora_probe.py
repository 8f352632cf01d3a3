"""Probe LoRA adapters: send three in turn to an engine whose base was updated, and compare with fresh engines.

On vLLM, or on SGLang where that alone is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flashpatch.verify.probes import jobs
from flashpatch.verify.probes.answers import TOKENS, Answers, equal, gap, pairs
from flashpatch.verify.probes.fp8 import tiny
from flashpatch.verify.proof import Proof

_proof = partial(Proof, "lora")
_TIMEOUT = 300.0  # seconds for both processes together
_SHARE = 0.1  # of what an adapter changes: rounding the merged weights to bf16 may change so much


def probe(nonce: str, workdir: Path) -> list[Proof]:
    environment = jobs.engine().IN_ONE
    tiny.adapted(workdir)
    commands = [
        jobs.job("fp8.job:adapters", workdir, environment=environment),
        jobs.job("fp8.job:fresh_adapters", workdir, jobs.FRESH, environment),
    ]
    ended = jobs.run(commands, workdir, _TIMEOUT).checked()
    return list(_judged(ended.seen["job"], ended.seen[jobs.FRESH]["answers"]))


def _judged(seen: Mapping[str, Any], fresh: Mapping[str, Answers]) -> Iterator[Proof]:
    found = seen["answers"]
    sent = "adapter {}, sent to a running engine, equals a fresh engine with it"
    shown = {name: sent.format(name) for name in tiny.ADAPTERS}
    shown["base"] = "the base, updated beside adapters, equals a fresh engine on it"
    for name, what in shown.items():
        apart = gap(found[name], fresh[name])
        yield _proof(what, equal(found[name], fresh[name]), f"largest difference of logprobs {apart:g}")
    last = found[tiny.ADAPTERS[-1]]
    effect, rounding = _apart(last, found["base"]), _apart(last, fresh[tiny.MERGED])
    yield _proof(
        "an adapter does what merging it into the weights does",
        0 < effect and rounding < _SHARE * effect,
        f"logprobs off by {rounding:.2g} on average, of {effect:.2g} that the adapter changes",
    )
    yield _proof(
        "an adapter that does not fit is refused by name, and the one before stays",
        "lora_A is" in seen["bad"] and equal(found["kept"], last),
        seen["bad"].partition("\n")[0] or "it was taken",
    )


def _apart(one: Answers, other: Answers) -> float:
    """Return the mean difference of the prompts' logprobs: those after depend on what was sampled."""
    apart = [abs(mine - its) for mine, its in pairs(one, other, skip=TOKENS)]
    return sum(apart) / len(apart)
