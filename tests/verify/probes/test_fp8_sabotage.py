"""A process of a real engine that starts without FlashPatch: verify fails and names it. Other sabotage: `test_engine_mutants`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine import limit
from tree import SUPPORT
from verify_command import verify

pytestmark = [pytest.mark.vllm, pytest.mark.full]


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        ("worker_without_environment", "the environment did not reach it"),
        ("core_without_environment", "engine-core"),
    ],
)
def test_a_process_without_flashpatch_is_named(tmp_path: Path, sabotage: str, said: str) -> None:
    done = verify("fp8", tmp_path, PYTHONPATH=str(SUPPORT / "fp8_sabotage"), SABOTAGE=sabotage)
    assert done.code == 1, done.text
    assert "wrote no row, though process" in str(done.family) and said in str(done.family), done.text
    [workdir] = tmp_path.glob("flashpatch-verify-*")
    own = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
    command = [Path(sys.executable).with_name("flashpatch-verify"), "--live", workdir / "ledger", "--json"]
    live = subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=limit(400))
    assert live.returncode == 1, f"--live does not see it:\n{live.stdout}{live.stderr}"
