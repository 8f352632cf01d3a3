"""Run the probe's engine on SGLang as a user's program would; the scheduler runs in another process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flashpatch.verify.probes.eagle import rounds
from flashpatch.verify.probes.eagle.rounds import MOST, TOKENS, prompts

_TURNS = {"exact": 3, "noise": 8, "after": 3}
"""Phases, and how often all prompts run in each; in the second a drafter of noise is rejected and rolled back."""


def main() -> None:
    """Run the job in this process."""
    rounds.main(run)


def run(workdir: Path, seen: dict[str, Any]) -> None:
    """Open one engine, send it a drafter of noise, and generate until that is rolled back and after."""
    import sglang
    from safetensors.torch import load_file

    from flashpatch.patches.eagle.sglang import drafter_refit
    from flashpatch.verify.probes.eagle import tiny

    began = time.monotonic()
    engine = sglang.Engine(**tiny.sglang_arguments(workdir / "target", workdir / "exact", MOST))
    seen["seconds"]["opened"] = time.monotonic() - began
    seen["lengths"] = {}
    for phase, turns in _TURNS.items():
        if phase == "noise":
            drafter_refit.send(engine, load_file(workdir / "noise" / "model.safetensors").items())
        rows = []
        for _ in range(turns):
            found = engine.generate(
                input_ids=prompts(),
                sampling_params=dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True),
            )
            rows.append([one["output_ids"] for one in found])
            lengths = seen["lengths"].setdefault(phase, [])
            lengths.append(max(one["meta_info"].get("spec_accept_length") or 1.0 for one in found))
        seen["tokens"][phase] = rows
