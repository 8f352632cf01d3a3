"""With ``fork_workers``, Ray's workers and what they spawn are forked from a process with verl and vLLM imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import cpu_lab
import pytest
from tree import SUPPORT

pytestmark = [pytest.mark.verl, pytest.mark.full]

FACTS = SUPPORT / "worker_facts.py"
WAIT = "RAY_worker_register_timeout_seconds"
"""Forks wait for the server's imports for a share of it, and start without it then; a busy machine needs long."""

SAME = (
    "path",
    "main",
    "flags",
    "folder",
    "umask",
    "blocked",
    "ignored",
    "nice",
    "oom",
    "files",
    "own_group",
    "session",
    "mine",
    "threads",
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the job of `worker_facts` saw."""
    folder = tmp_path_factory.mktemp("job")
    # Ray's own default of threads per worker is looked at, so that the variable is not set here
    config = folder / "fork.toml"
    config.write_text("[cpu]\nfork_workers = true\n")
    environment = cpu_lab.environment(
        folder, FLASHPATCH="cpu,bf16", FLASHPATCH_CONFIG=str(config), TMPDIR=str(folder), **{WAIT: "400"}
    )
    environment.pop("OMP_NUM_THREADS")
    done = subprocess.run(
        [sys.executable, FACTS], env=environment, cwd=folder, capture_output=True, text=True, timeout=600
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")] or [None]
    assert done.returncode == 0 and line, cpu_lab.tail(done)
    return {**json.loads(line.removeprefix("SEEN ")), "said": done.stderr, "folder": folder}


def test_workers_are_forked_with_the_modules_loaded(job):
    for name in ("one", "two"):
        assert job[name]["forked"] and job[name]["loaded"], job[name]
    assert job["one"]["parent"] == job["two"]["parent"]


def test_a_worker_with_another_environment_is_not(job):
    """The reference for those that are."""
    assert not job["other"]["forked"] and not job["other"]["loaded"]
    assert "not forked: VLLM_LOGGING_LEVEL differ" in job["said"]


@pytest.mark.parametrize("fact", SAME)
def test_a_forked_worker_is_like_any_other(job, fact):
    assert job["one"][fact] == job["other"][fact]


def test_arguments_and_variables_are_those_of_any_other(job):
    assert set(job["one"]["argv"]) == set(job["other"]["argv"])
    assert set(job["other"]["names"]) - set(job["one"]["names"]) <= {"VLLM_LOGGING_LEVEL"}


def test_what_is_drawn_at_random_differs(job):
    for one, two in zip(job["one"]["drawn"], job["two"]["drawn"], strict=True):
        assert one != two


def test_threads_are_as_many_as_ray_says(job):
    assert job["one"]["threads"] == ["1", 1] and job["four"]["threads"] == job["other_four"]["threads"]
    assert job["four"]["forked"] and not job["other_four"]["forked"] and job["four"]["threads"][0] == "4"


def test_spawned_processes_are_forked_and_end_as_they_should(job):
    assert [process["code"] for process in job["spawned"]] == [0, 3, -9, -15]
    for process in job["spawned"]:
        assert process["forked"] and process["loaded"] and process["pipe_ended"] and process["gone"], process
        assert process["path"][0] == job["spawned"][0]["path"][0] and process["threads"] == ["1", 1]


def test_vllm_inspects_models_in_a_fork(job):
    assert job["inspection"] == [job["one"]["parent"], "__main__"]


def test_ray_learns_that_a_forked_worker_died(job):
    assert "died" in job and job["killed"]


def test_nothing_is_left(job):
    """The server ends after Ray has, and takes its folder along."""
    end = time.monotonic() + 60
    while Path(f"/proc/{job['one']['parent']}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path(f"/proc/{job['one']['parent']}").exists()
    assert not list(job["folder"].glob("flashpatch-*"))


def test_without_the_family_no_worker_is_forked(tmp_path):
    """What a stock job's worker is like; and the server is only for jobs of verl."""
    code = """
        import os, sys, ray
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
        name = ray.get(ray.remote(lambda: open(f"/proc/{os.getppid()}/cmdline").read()).remote())
        assert "raylet" in name and "warm" not in name, name
    """
    for names in ("", "cpu"):
        done = cpu_lab.python(code, tmp_path, **({"FLASHPATCH": names} if names else {}))
        assert done.returncode == 0, cpu_lab.tail(done)


def test_variables_that_imports_read_must_be_equal():
    from flashpatch.patches.cpu.warm.variables import hindrances

    base = {b"HF_HUB_OFFLINE": b"1", b"RANK": b"0", b"GONE": b""}
    wanted = {
        b"HF_HUB_OFFLINE": b"0",
        b"RANK": b"3",
        b"BY_IMPORT": b"x",
        b"NEW": b"1",
        b"VLLM_CPU_KVCACHE_SPACE": b"1",
    }
    assert hindrances(wanted, base, {b"BY_IMPORT": b"x"}) == ["GONE", "HF_HUB_OFFLINE", "NEW"]
    assert hindrances(dict(base), base, {}) == []


def test_preloaded_libraries_hinder_unless_they_are_openmp_and_loaded():
    from flashpatch.patches.cpu.warm.variables import hindrances

    (libc,) = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libc.so" in line
    }
    assert hindrances({b"LD_PRELOAD": os.fsencode(libc)}, {}, {}) == ["LD_PRELOAD"]
    assert hindrances({b"LD_PRELOAD": b"/nowhere/libgomp.so.1"}, {}, {}) == ["LD_PRELOAD"]
    torch = pytest.importorskip("torch")
    for gomp in Path(torch.__file__).parent.glob("lib/libgomp*"):
        assert hindrances({b"LD_PRELOAD": os.fsencode(gomp)}, {}, {}) == []
        assert hindrances({}, {b"LD_PRELOAD": os.fsencode(gomp)}, {}) == ["LD_PRELOAD"]
