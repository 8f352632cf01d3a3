"""Run the tests that need a GPU's graphs, and the checks of `make test-gpu`, on the fake device: see its README."""

import subprocess
import sys
import time

import pytest
from cuda_lab import check, runs
from cuda_lab.lane import NEEDS_DEVICE
from fake_cuda.variables import variables
from tree import TREE

pytestmark = [pytest.mark.cuda, NEEDS_DEVICE]


def test_what_needs_a_device() -> None:
    tests = "tests/patches/fp8/update/test_cuda_readings.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    env = variables(runs.ENVIRONMENT, 90)
    done = subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def test_what_is_checked_on_a_gpu_runs_here_but_for_speed(tmp_path) -> None:
    rows = list(check.Check(tmp_path, fake=90).rows(["losses", "tokens:bf16"]))
    assert [(row.case, row.verdict) for row in rows] == [
        ("losses:logprobs", "equal"),
        ("losses:gradient", "equal"),
        ("tokens:bf16", "measured"),
    ], rows
    assert " at 4" in rows[-1].detail and "Error" not in rows[-1].detail


def test_a_case_that_the_time_does_not_allow_has_a_row(tmp_path) -> None:
    over = check.Check(tmp_path, fake=90, deadline=time.monotonic())
    assert [row.verdict for row in over.rows(["storage:bf16", "tokens:bf16"])] == ["not run", "not run"]
