"""Run the tests that need a GPU's graphs, and the checks of `make test-gpu`, on the fake device: see its README."""

import json
import os
import subprocess
import sys
import time

import pytest
from cuda_lab import check, runs
from cuda_lab.lane import NEEDS_DEVICE
from fake_cuda.variables import variables
from tree import SUPPORT, TREE

pytestmark = [pytest.mark.cuda, NEEDS_DEVICE]


def test_what_needs_a_device() -> None:
    tests = "tests/patches/fp8/update/test_cuda_readings.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    env = variables(runs.ENVIRONMENT, 90)
    done = subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


MEASURED = ("tokens:eagle_stock", "tokens:eagle", "tokens:bf16", "tokens:experts_stock")
MEASURED += ("update:7B_bf16", "sleep:bf16_2", "step:fp8")


def test_what_is_checked_on_a_gpu_runs_here_but_for_speed(tmp_path) -> None:
    found = {row.case: row for row in check.Check(tmp_path, fake=90).rows(["losses", *MEASURED])}
    wanted = dict.fromkeys(("losses:logprobs", "losses:gradient"), "equal") | dict.fromkeys(
        MEASURED, "measured"
    )
    assert {case: row.verdict for case, row in found.items()} == wanted, found
    assert " at 4 of 16" in found["tokens:bf16"].detail
    # an exact drafter, and arms that were named
    assert "at 1 of 16, drafts right 1.000" in found["tokens:eagle"].detail
    assert "3_1_4" in found["tokens:eagle"].detail
    assert all(found["update:7B_bf16"].detail.count(word) == 2 for word in ("layer", "model"))
    assert all(f"{part} " in found["step:fp8"].detail for part in ("gen", "update_weights", "step"))


def test_a_name_that_no_case_begins_with_is_an_error(tmp_path) -> None:
    with pytest.raises(SystemExit, match=r"no case begins with tokens:int9; there are .*tokens:int8,"):
        list(check.Check(tmp_path, fake=90).rows(["losses", "tokens:int9"]))


def test_who_kills_it_keeps_the_rows_that_were_written(tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        "-m",
        "cuda_lab.gpu",
        "--fake",
        "--rows",
        rows,
        "--cases",
        "losses",
        "tokens:bf16",
    ]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(SUPPORT)}, stdout=subprocess.PIPE
    ) as run:
        for line in run.stdout:
            if b"losses:gradient" in line:
                run.kill()
    kept = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row.get("case", "device") for row in kept] == ["device", "losses:logprobs", "losses:gradient"]
    assert run.returncode < 0


def test_a_case_that_the_time_does_not_allow_has_a_row(tmp_path) -> None:
    over = check.Check(tmp_path, fake=90, deadline=time.monotonic())
    assert [row.verdict for row in over.rows(["storage:bf16", "tokens:bf16"])] == ["not run", "not run"]
