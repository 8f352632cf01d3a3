"""Run the tests that need a GPU's graphs, and the checks of `make test-gpu`, on the fake device: see its README."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from cuda_lab import check, runs
from cuda_lab.lane import NEEDS_DEVICE
from fake_cuda.variables import variables
from machine import limit
from tree import TREE

pytestmark = [pytest.mark.cuda, NEEDS_DEVICE]


def test_what_needs_a_device() -> None:
    tests = "tests/patches/fp8/update/test_cuda_readings.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    env = variables(runs.ENVIRONMENT, 90)
    done = subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def rehearsed(folder: Path, *words: str) -> dict[str, str]:
    """Return what each row says; all that is measured must have been."""
    rows = list(check.Check(folder, fake=90).rows(words))
    assert [(row.case, row.verdict) for row in rows] == [(word, "measured") for word in words], rows
    return {row.case: row.detail for row in rows}


RATIO = r"[\d.]+ {} \([\d.]+\)"
A_RATE = r"1 of 16 [\d.]+ tokens/s"


def test_rates_are_measured_against_stocks_in_the_order_that_was_asked_for(tmp_path) -> None:
    found = rehearsed(tmp_path, "tokens:eagle_stock", "tokens:eagle", "tokens:stock", "tokens:fp8")
    # an exact drafter, and arms that were named
    assert re.search(A_RATE + r", 1 of its drafts right;", found["tokens:eagle_stock"])
    assert re.search(A_RATE + r" \([\d.]+\), 1 of its drafts right", found["tokens:eagle"])
    assert "3_1_4" in found["tokens:eagle"]
    assert re.search(A_RATE + ";", found["tokens:stock"])
    assert len(re.findall(r"of \d+ " + RATIO.format("tokens/s"), found["tokens:fp8"])) == 3


def test_updates_and_sleep_are_measured_against_vllms_own(tmp_path) -> None:
    found = rehearsed(tmp_path, "update:7B_bf16", "sleep:stock_2", "sleep:bf16_2")
    ways = [f"{size} {atomic}" for atomic in ("layer", "model") for size in ("512 MiB", "2 GiB")]
    for way in ways:
        assert re.search(f"{way} {RATIO.format('s')}, {RATIO.format('calls')}", found["update:7B_bf16"])
    for part in "sleep", "wake weights", "update", "wake cache", "last asleep":
        unit = "GiB of the device" if "asleep" in part else "s"
        assert re.search(f"{part} {RATIO.format(unit)}", found["sleep:bf16_2"]), found


def test_a_jobs_step_is_measured(tmp_path) -> None:
    found = rehearsed(tmp_path, "step:fp8")["step:fp8"]
    assert all(re.search(rf"{part} [\d.]+ s", found) for part in ("gen", "update_weights", "step"))


def test_a_name_that_no_case_begins_with_is_an_error(tmp_path) -> None:
    with pytest.raises(SystemExit, match=r"no case begins with tokens:int9; there are .*tokens:int8,"):
        list(check.Check(tmp_path, fake=90).rows(["storage", "tokens:int9"]))


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
        "storage:bf16",
        "storage:fp8",
        "tokens:bf16",
    ]
    env = {**os.environ, "PYTHONPATH": check.PATHS}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as run:
        for line in run.stdout:
            if b"storage:fp8" in line:
                run.kill()
    kept = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row.get("case", "device") for row in kept] == ["device", "storage:bf16", "storage:fp8"]
    assert [row["verdict"] for row in kept[1:]] == ["equal", "equal"]
    assert run.returncode < 0


def of_jobs(folder: Path) -> list[int]:
    """Return the processes whose commands name a folder's world."""
    found = psutil.process_iter(["cmdline"])
    return [one.pid for one in found if f"{folder}/world" in " ".join(one.info["cmdline"] or ())]


@pytest.mark.skipif(find_spec("verl") is None, reason="verl is not here")
def test_a_job_of_verl_ends_with_the_lab(tmp_path) -> None:
    """Else it keeps the card's memory when the time is up, or somebody ends the lab."""
    train = (
        "import cuda_job, sys; from pathlib import Path as P; cuda_job.train(P(sys.argv[1]), P(sys.argv[2]))"
    )
    env = {**os.environ, "PYTHONPATH": check.PATHS}
    lab = runs.begin(["-c", train, f"{tmp_path}/world", f"{tmp_path}/job"], env, tmp_path / "log")
    end = time.monotonic() + limit(60)
    while len(of_jobs(tmp_path)) < 3 and time.monotonic() < end:  # the lab's shell, the lab, its job
        time.sleep(0.1)
    assert lab.poll() is None and len(of_jobs(tmp_path)) > 2, (tmp_path / "log").read_text()
    os.killpg(lab.pid, signal.SIGKILL)  # as `runs.stream` does
    lab.wait()
    time.sleep(limit(2))
    left = of_jobs(tmp_path)
    for one in left:
        os.kill(one, signal.SIGKILL)
    assert not left


def test_a_case_that_the_time_does_not_allow_has_a_row(tmp_path) -> None:
    over = check.Check(tmp_path, fake=90, deadline=time.monotonic())
    assert [row.verdict for row in over.rows(["storage:bf16", "tokens:bf16"])] == ["not run", "not run"]
