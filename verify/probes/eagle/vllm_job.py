"""Run the probe's engine on vLLM as a user's program would. The engine core runs in another process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flashpatch.verify.probes.eagle import rounds
from flashpatch.verify.probes.eagle.rounds import DRAFTERS, MAX_DRAFTS, TOKENS, prompts


def main() -> None:
    """Run the job in this process."""
    rounds.main(run)


def run(workdir: Path, seen: dict[str, Any]) -> None:
    """Run one engine with its drafters in turn."""
    from vllm import LLM, SamplingParams

    from flashpatch.verify.probes.eagle import tiny

    began = time.monotonic()
    llm = LLM(
        **tiny.engine_arguments(
            workdir / "target",
            max_num_batched_tokens=32,
            speculative_config=dict(
                method="eagle", model=str(workdir / DRAFTERS[0]), num_speculative_tokens=MAX_DRAFTS
            ),
        )
    )
    seen["seconds"]["opened"] = time.monotonic() - began
    seen["versions"] = []

    def generate() -> list[list[int]]:
        found = llm.generate(
            [{"prompt_token_ids": text} for text in prompts()],
            SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return [list(one.outputs[0].token_ids) for one in found]

    def update(folder: Path) -> None:
        seen["versions"].append(len(seen["versions"]) + 1)
        llm.collective_rpc("eagle_update_drafter", args=(str(folder), seen["versions"][-1]))

    rounds.run_rounds(workdir, seen, generate, update)
    [seen["captured"]] = llm.collective_rpc("eagle_flush")
