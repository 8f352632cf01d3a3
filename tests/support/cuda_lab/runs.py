"""Run the labs of this package in processes of their own, on the fake device or a GPU; read what they wrote down."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import warm
from fake_cuda.variables import variables
from machine import limit

ENVIRONMENT = Path(sys.prefix)


def is_built() -> bool:
    """Whether the fake device was built for this interpreter's environment."""
    return (ENVIRONMENT / "fake_cuda" / "fake_cuda_redirect.so").exists()


def environment(capability: int, **more: str) -> dict[str, str]:
    """Return variables for a process on the fake device of this capability, or on the GPU if it is 0."""
    more = {"VLLM_LOGGING_LEVEL": "ERROR", **more}
    if capability:
        return variables(ENVIRONMENT, capability, **more)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
    return {**kept, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", **more}


def run(
    folder: Path,
    what: str,
    mode: str,
    capability: int,
    names: Sequence[str],
    imported: Sequence[str] = (),
    **more: str,
) -> dict[str, dict[str, Any]]:
    """Return the result of each case.

    Args:
        folder: for checkpoints, which later runs share, and for what this run writes.
        what: `storage`, `engine`, `drafts` or `losses`, the module of this package to run.
        mode: `fresh`, or `update`: then FlashPatch is on, unless `more` says FLASHPATCH="0"; of losses "".
        capability: ten times the fake device's compute capability; 0: the GPU.
        names: of `cuda_lab.cases.CASES`; for engines with their steps; of drafts the arms.
        imported: modules that the process finds imported, as a fork of one that has done it; none: a new interpreter.
        more: further variables; `ATOMIC` is the option of FlashPatch.
    """
    patches = {"FLASHPATCH_LEDGER": str(folder / "ledger")}
    if mode == "update":
        options = folder / f"{more.get('ATOMIC', 'layer')}.toml"
        options.write_text(f'[fp8]\natomic = "{options.stem}"\n')
        patches |= {"FLASHPATCH": "bf16", "FLASHPATCH_CONFIG": str(options)}
    env = environment(capability, **{**patches, **more})
    out = Path(tempfile.mkdtemp(dir=folder), "results")
    arguments = ["-m", f"cuda_lab.{what}"]
    arguments += [mode, str(folder / "checkpoints"), str(out), *names] if mode else [str(out)]
    timeout = limit(240 + 30 * len(names))
    if imported:
        done = warm.run(imported, arguments, env=env, cwd=folder, timeout=timeout)
    else:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    if not out.exists():
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return pickle.loads(out.read_bytes())
