"""The probe's engine: what a user's program would do with vLLM, and what it saw.

Run by `flashpatch.patches.eagle.probe` in a process of its own; the engine core runs in another.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MOST = 3
ROUNDS = ("exact", "noise", "exact2")
"""Drafters in the order in which the engine has them; the first it is opened with."""


def prompts() -> list[list[int]]:
    return [[3 + (7 * number + place * place) % 29 for place in range(5 + 9 * number)] for number in range(4)]


def main() -> None:
    """Write ``seen.json`` in the directory given."""
    workdir = Path(sys.argv[1])
    seen: dict[str, Any] = {"tokens": {}, "seconds": {}}
    try:
        _run(workdir, seen)
    except Exception as error:
        seen["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        (workdir / "seen.json").write_text(json.dumps(seen))
    os._exit(0)  # all is said; vLLM's shutdown takes seconds


def _run(workdir: Path, seen: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    from flashpatch.patches.eagle import tiny

    began = time.monotonic()
    llm = LLM(
        **tiny.engine_arguments(
            workdir / "target",
            max_num_batched_tokens=32,
            speculative_config=dict(
                method="eagle", model=str(workdir / ROUNDS[0]), num_speculative_tokens=MOST
            ),
        )
    )
    seen["seconds"]["opened"] = time.monotonic() - began
    for number, name in enumerate(ROUNDS):
        began = time.monotonic()
        if number:
            seen["updated"] = llm.collective_rpc("eagle_update_drafter", args=(str(workdir / name), number))
        rows = []
        for _ in range(3):
            found = llm.generate(
                [{"prompt_token_ids": text} for text in prompts()],
                SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False),
                use_tqdm=False,
            )
            rows.append([list(one.outputs[0].token_ids) for one in found])
        seen["tokens"][name] = rows
        seen["seconds"][name] = time.monotonic() - began
    # Another update, for the acceptance before it to be noted.
    llm.collective_rpc("eagle_update_drafter", args=(str(workdir / ROUNDS[0]), len(ROUNDS)))
    [seen["captured"]] = llm.collective_rpc("eagle_flush")
    time.sleep(2.5)  # rows of the ledger are written once a second


if __name__ == "__main__":
    main()
