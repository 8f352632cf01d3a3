"""Run the probe's engine on SGLang as a user's program would. The scheduler runs in another process."""

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
    import sglang
    from safetensors.torch import load_file

    from flashpatch.patches.eagle.sglang import drafter_refit
    from flashpatch.verify.probes.eagle import tiny

    began = time.monotonic()
    engine = sglang.Engine(**tiny.sglang_arguments(workdir / "target", workdir / DRAFTERS[0], MAX_DRAFTS))
    seen["seconds"]["opened"] = time.monotonic() - began

    def generate() -> list[list[int]]:
        found = engine.generate(
            input_ids=prompts(),
            sampling_params=dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True),
        )
        return [one["output_ids"] for one in found]

    def update(folder: Path) -> None:
        drafter_refit.send(engine, load_file(folder / "model.safetensors").items())

    rounds.run_rounds(workdir, seen, generate, update)
