"""Run the probe's engine on vLLM as a user's program would; the engine core runs in another process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flashpatch.verify.probes.eagle import rounds
from flashpatch.verify.probes.eagle.rounds import MOST, TOKENS, prompts

ROUNDS = ("exact", "noise", "exact2")
"""Drafters in the order in which the engine gets them; it is opened with the first."""


def main() -> None:
    """Run the job in this process."""
    rounds.main(run)


def run(workdir: Path, seen: dict[str, Any]) -> None:
    """Open one engine, generate, and update its drafter in turn; write tokens and seconds to ``seen``."""
    from vllm import LLM, SamplingParams

    from flashpatch.verify.probes.eagle import tiny

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
        if number:
            llm.collective_rpc("eagle_update_drafter", args=(str(workdir / name), number))
        rows = []
        for _ in range(3):
            found = llm.generate(
                [{"prompt_token_ids": text} for text in prompts()],
                SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False),
                use_tqdm=False,
            )
            rows.append([list(one.outputs[0].token_ids) for one in found])
        seen["tokens"][name] = rows
    # Another update, for the acceptance before it to be noted.
    llm.collective_rpc("eagle_update_drafter", args=(str(workdir / ROUNDS[0]), len(ROUNDS)))
    [seen["captured"]] = llm.collective_rpc("eagle_flush")
