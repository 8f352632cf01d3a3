"""Requests of the probe's engines, the order of their drafters, and the frame around their jobs, which run in
processes of their own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_DRAFTS = 3
TOKENS = 80
TURNS = 3
DRAFTERS = ("exact", "noise", "exact2")
"""Drafters in the order in which the engine gets them; it is opened with the first."""


def prompts() -> list[list[int]]:
    """Return four prompts of token ids, of different lengths."""
    return [[3 + (7 * number + place * place) % 29 for place in range(5 + 9 * number)] for number in range(4)]


def write_drafters(workdir: Path, engine: str) -> None:
    """Write the drafters for an engine, ``vllm`` or ``sglang``."""
    from flashpatch.verify.probes.eagle import tiny

    for seed, name in enumerate(DRAFTERS):
        tiny.drafter(workdir / name, exact=name != "noise", seed=seed, engine=engine)


def run_rounds(
    workdir: Path,
    seen: dict[str, Any],
    generate: Callable[[], list[list[int]]],
    update: Callable[[Path], None],
) -> None:
    """Ask all prompts with each drafter in turn, `TURNS` times, and note the answers.

    A last update ends the judgement of the third drafter, so that its acceptance is in the ledger.

    Args:
        generate: returns the greedy tokens of each prompt.
        update: gives the engine the drafter of a folder.
    """
    for number, name in enumerate(DRAFTERS):
        if number:
            update(workdir / name)
        seen["tokens"][name] = [generate() for _ in range(TURNS)]
    update(workdir / DRAFTERS[0])


def main(run: Callable[[Path, dict[str, Any]], None]) -> None:
    """Call ``run``, which fills a dictionary of observations, and write that to ``seen.json`` in the directory
    ``sys.argv[1]``."""
    workdir = Path(sys.argv[1])
    seen: dict[str, Any] = {"tokens": {}, "seconds": {}}
    try:
        run(workdir, seen)
        time.sleep(2.5)  # rows of the ledger are written once a second
    except Exception as error:
        seen["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        (workdir / "seen.json").write_text(json.dumps(seen))
    os._exit(0)  # an engine's shutdown takes seconds
