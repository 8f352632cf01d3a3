"""Run `cuda_lab.storage` and `cuda_lab.engine` on the fake device in processes of their own; read what they wrote down."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from fake_cuda.variables import variables
from machine import limit

ENVIRONMENT = Path(sys.prefix)


def is_built() -> bool:
    """Whether the fake device was built for this interpreter's environment."""
    return (ENVIRONMENT / "fake_cuda" / "fake_cuda_redirect.so").exists()


def run(
    folder: Path, what: str, mode: str, capability: int, names: list[str], **more: str
) -> dict[str, dict[str, Any]]:
    """Return the result of each case.

    Args:
        what: `storage` or `engine`, the module of this package to run.
        folder: for checkpoints, which later runs share, and for what this run writes.
        mode: `fresh`, or `update`: then FlashPatch is on, unless `more` says FLASHPATCH="0".
        capability: ten times the compute capability.
        names: of `cuda_lab.cases.CASES`; for engines with their steps.
        more: further variables.
    """
    patches = {"FLASHPATCH": "bf16", "FLASHPATCH_LEDGER": str(folder / "ledger")} if mode == "update" else {}
    env = variables(ENVIRONMENT, capability, VLLM_LOGGING_LEVEL="ERROR", **{**patches, **more})
    out = folder / f"{what}-{mode}-{capability}-{'-'.join(more.values())}.pickle"
    command = [sys.executable, "-m", f"cuda_lab.{what}", mode, str(folder / "checkpoints"), str(out), *names]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=limit(120 + 20 * len(names))
    )
    if not out.exists():
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return pickle.loads(out.read_bytes())
