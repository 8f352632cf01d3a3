"""Weights on their way to SGLang's server on a CPU, pickled by SGLang's own functions."""

from pathlib import Path

import pytest
import warm
from cpu_lab import environment
from machine import limit
from tree import SUPPORT

pytestmark = [pytest.mark.verl, pytest.mark.sglang]


def send(folder: Path, **variables: str) -> str:
    """What became of one tensor."""
    done = warm.run(
        warm.VERL_SGLANG,
        [SUPPORT / "sglang_send.py"],
        env=environment(folder, SGLANG_USE_CPU_ENGINE="1", **variables),
        cwd=folder,
        timeout=limit(120),
    )
    assert "shared memory:" in done.stdout, done.stderr[-3000:]
    return done.stdout


def test_a_tensor_arrives_and_stays_the_trainers_own(tmp_path: Path) -> None:
    said = send(tmp_path, FLASHPATCH="cpu")
    assert "arrived: w [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]" in said and "shared memory: False" in said
