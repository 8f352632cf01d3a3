"""Run the probe's engine, on vLLM or SGLang, with its drafters in turn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flashpatch.patches.eagle.drafter_refit.commands import FLUSH, UPDATE
from flashpatch.verify.probes import jobs

MAX_DRAFTS = 3
TOKENS = 80
TURNS = 3
DRAFTERS = ("exact", "noise", "exact2")
"""Drafters in the order in which the engine gets them; it is opened with the first."""


def prompts() -> list[list[int]]:
    """Return four prompts of token ids, of different lengths."""
    return [[3 + (7 * number + place * place) % 29 for place in range(5 + 9 * number)] for number in range(4)]


def run(workdir: Path, seen: dict[str, Any]) -> None:
    """Note the answers to all prompts with each drafter in turn, `TURNS` times. A last update writes the third drafter's
    acceptance to the ledger; then sampled requests are answered."""
    from flashpatch.verify import sampled
    from flashpatch.verify.probes.eagle import tiny

    began, engine, answers = time.monotonic(), jobs.engine(), list[dict[str, Any]]()
    first = workdir / DRAFTERS[0]
    drafts = dict(method="eagle", model=str(first), num_speculative_tokens=MAX_DRAFTS)
    own = dict(max_num_seqs=8, max_num_batched_tokens=32, speculative_config=drafts)
    own = tiny.drafting(first, MAX_DRAFTS) if engine.NAME == "sglang" else own
    opened = engine.Engine(workdir / "target", dtype="float32", **own)
    seen |= {"opened": time.monotonic() - began, "answers": answers}
    jobs.tell(workdir, f"an engine is open ({seen['opened']:.0f} s)")

    def ask(prompts: list[list[int]], asked: list[dict[str, float]]) -> None:
        found = zip(prompts, asked, opened.generate(prompts, asked, TOKENS), strict=True)
        answers.extend(dict(prompt=prompt, asked=one, **answer) for prompt, one, answer in found)

    def update(name: str, version: int) -> None:
        opened.call(FLUSH)  # a turn later SGLang's scheduler lists the answered requests no more
        opened.call(UPDATE, str(workdir / name), version)

    for number, name in enumerate(DRAFTERS):
        if number:
            update(name, number)
        for _ in range(TURNS):
            ask(prompts(), [sampled.GREEDY] * len(prompts()))
        jobs.tell(workdir, f"it has drafted with drafter {name}")
    update(DRAFTERS[0], len(DRAFTERS))
    for prompt, asked in sampled.batches(engine.NAME):
        ask([prompt] * len(asked), asked)
    jobs.tell(workdir, "it has answered sampled requests")
    seen["captured"] = opened.call(FLUSH)
