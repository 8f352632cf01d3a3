"""The patches for verl on the installed verl: armed, and undone without a trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import sglang_lab
import warm
from cpu_lab import environment, tail
from machine import limit
from tree import SUPPORT

SCRIPT = SUPPORT / "verl_groups.py"


@pytest.mark.parametrize(
    "engine, imported",
    [
        pytest.param("verl_vllm", warm.VERL_VLLM, marks=pytest.mark.verl),
        pytest.param(
            f"verl_{sglang_lab.FRAMEWORK}",
            warm.VERL_SGLANG,
            marks=[pytest.mark.verl, pytest.mark.sglang],
        ),
    ],
)
def test_armed_and_undone(tmp_path: Path, engine: str, imported: Sequence[str]) -> None:
    variables = environment(tmp_path, SGLANG_USE_CPU_ENGINE="1")
    groups = ["verl", engine]
    examined = subprocess.run(
        [sys.executable, SCRIPT, "examine", *groups],
        env=variables,
        capture_output=True,
        text=True,
        timeout=limit(60),
    )
    assert examined.returncode == 0, tail(examined)
    done = warm.run(imported, [SCRIPT, "arm", *groups], env=variables, cwd=tmp_path, timeout=limit(400))
    assert done.returncode == 0, tail(done)
