"""The patches for verl on the installed verl: armed, and undone without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine import limit
from tree import SUPPORT


@pytest.mark.parametrize(
    "number, engine",
    [
        pytest.param(22, "verl_vllm", marks=pytest.mark.verl),
        pytest.param(16, "verl_sglang", marks=[pytest.mark.verl, pytest.mark.sglang]),
    ],
)
def test_armed_and_undone(tmp_path: Path, number: int, engine: str) -> None:
    ours = ("FLASHPATCH", "VERL_", "RAY_", "SGLANG_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, SUPPORT / "verl_groups.py", str(number), "verl", engine],
        env={
            **clean,
            "FLASHPATCH_LEDGER": str(tmp_path),
            "HF_HUB_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCH_COMPILE_DISABLE": "1",
        },
        capture_output=True,
        text=True,
        timeout=limit(400),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
