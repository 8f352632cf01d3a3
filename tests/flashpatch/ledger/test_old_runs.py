"""Which runs are removed from a ledger, which stay, and who removes them."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashpatch import ledger
from flashpatch.ledger import files, old_runs, runs

DAY = 86400.0
DEAD = 1 << 30  # above the largest pid


def put(home: Path, run: str, days: float, pid: int = DEAD, start: str = "5", host: str = "") -> Path:
    """A run with one row, last written ``days`` ago."""
    folder = home / run
    folder.mkdir(parents=True, exist_ok=True)
    value = {**files.row({}), "run": run, "host": host or files.host(), "pid": pid, "start": start}
    (folder / files.file_name("row", value["host"], pid, start)).write_text(json.dumps(value))
    age(folder, days)
    return folder


def age(folder: Path, days: float) -> None:
    os.utime(folder, (time.time() - days * DAY,) * 2)


def names(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir())


def prune(home: Path, days: float = 30, runs: int = 500, present: str = "present") -> list[str]:
    return sorted(old_runs.prune(home, present, days, runs))


@pytest.mark.parametrize("many", [80, pytest.param(1000, marks=pytest.mark.full)])
def test_many_runs_come_down_to_the_limit_in_some_starts(tmp_path, many):
    for number in range(many):
        put(tmp_path, f"r{number}", 2 + number / many)
    removed = [len(prune(tmp_path, runs=many // 2)) for _ in range(many // 40)]
    assert {*removed} == {20} and len(names(tmp_path)) == many // 2 and prune(tmp_path, runs=many // 2) == []
    chosen = runs.choose(tmp_path)
    assert chosen is not None and chosen.name == "r0"


def test_nobody_waits_while_old_runs_are_removed(finish):
    out = finish("""
        from flashpatch.ledger import old_runs
        old_runs.prune = lambda *_: time.sleep(1.5)
        before = time.monotonic()
        ledger.boot()
        print(time.monotonic() - before)
    """)
    assert float(out) < 1.0


def test_by_number_those_in_which_nothing_happened_go_first(tmp_path):
    for days in range(1, 7):
        folder = put(tmp_path, f"r{days}", days)
        if days > 3:
            (folder / f"events-{files.host()}-{DEAD}-5.jsonl").write_text("{}")
            age(folder, days)
    assert prune(tmp_path, runs=4) == ["r2", "r3"]
    assert prune(tmp_path, runs=2) == ["r1", "r6"]


def test_the_present_run_and_what_was_just_written_stay(tmp_path):
    put(tmp_path, "present", 400)
    put(tmp_path, "between-two-steps", 0.5 / 24)
    put(tmp_path, "old", 2)
    assert prune(tmp_path, runs=1) == ["old"]


@pytest.mark.parametrize("kind", ["row", "expect"])
def test_a_run_whose_process_is_alive_stays(tmp_path, kind):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder = put(tmp_path, "r", 0)
    value = {"host": files.host(), "pid": child.pid, "start": files.process_start(child.pid)}
    if kind == "row":
        put(tmp_path, "r", 0, child.pid, value["start"])
    else:
        value |= {"roles": [], "families": [], "by": 1}
        name = files.file_name("expect", files.host(), child.pid, value["start"])
        (folder / name).write_text(json.dumps(value))
    age(folder, 400)
    assert prune(tmp_path) == []
    child.communicate(b"\n")
    assert prune(tmp_path) == ["r"]


def test_what_runs_on_another_host_may_be_alive_while_it_is_young(tmp_path):
    put(tmp_path, "young", 20, host="elsewhere")
    put(tmp_path, "old", 31, host="elsewhere")
    assert prune(tmp_path, runs=0) == ["old"]
    put(tmp_path, "newer", 1)
    assert prune(tmp_path, runs=1) == []


@pytest.mark.parametrize(("days", "host", "left"), [(31, "", 0), (2, "", 2), (2, "elsewhere", 3), (0, "", 3)])
def test_captured_samples_go_once_no_process_of_their_run_can_be_alive(tmp_path, days, host, left):
    folder = put(tmp_path, "r", 0, host=host)
    (folder / ".row-h-1-5.json.77").write_text("{")
    (folder / "samples").mkdir()
    (folder / "samples" / "1.safetensors").write_bytes(b"0" * 100)
    age(folder, days)
    before = folder.stat().st_mtime
    prune(tmp_path)
    assert folder.exists() == (left > 0) and (not left or len(names(folder)) == left)
    assert (folder / "samples").exists() == (left == 3)
    assert not left or folder.stat().st_mtime == before


@pytest.mark.parametrize("other", ["results.csv", "checkpoints/x", "row-notes.txt"])
def test_a_directory_with_somebodys_files_stays(tmp_path, other):
    folder = put(tmp_path, "r", 0)
    (folder / other).parent.mkdir(exist_ok=True)
    (folder / other).write_text("work of months")
    age(folder, 400)
    assert prune(tmp_path) == [] and (folder / other).read_text() == "work of months"


def test_directories_that_are_no_runs_stay(tmp_path):
    for name in ("empty", "photos"):
        (tmp_path / name).mkdir()
    (tmp_path / "photos" / "one.jpg").write_text("")
    put(tmp_path, "first", 0).rename(tmp_path / "copy")
    outside = put(tmp_path.parent / "outside", "r", 400)
    (tmp_path / "linked").symlink_to(outside)
    for name in ("empty", "photos", "copy"):
        age(tmp_path / name, 400)
    assert prune(tmp_path) == []
    assert names(tmp_path) == ["copy", "empty", "linked", "photos"] and list(outside.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_run_stays(tmp_path):
    folder = put(tmp_path, "r", 0)
    os.chown(folder, 65534, -1)
    age(folder, 400)
    assert prune(tmp_path) == []


def test_what_a_killed_process_left_is_removed_and_is_no_run(tmp_path):
    folder = put(tmp_path, "r", 400)
    left = tmp_path / f"{old_runs.REMOVED}r-1"
    folder.rename(left)
    assert ledger.read(tmp_path) == []
    assert prune(tmp_path) == [] and names(tmp_path) == []


def test_several_at_once_remove_each_run_once(tmp_path):
    for number in range(60):
        put(tmp_path, f"r{number}", 31 + number)
    put(tmp_path, "kept", 1)
    with ThreadPoolExecutor(6) as pool:
        removed = [name for found in pool.map(lambda _: prune(tmp_path), range(6)) for name in found]
    assert sorted(removed) == sorted(f"r{number}" for number in range(60))
    assert names(tmp_path) == ["kept"]


def test_the_process_that_begins_a_run_removes_old_ones_once(home, finish):
    put(home, "old", 31)
    finish("""
        import subprocess
        from flashpatch.ledger import old_runs
        ledger.boot()
        ledger.flush()
        assert not os.path.exists(os.environ["FLASHPATCH_LEDGER"] + "/old")
        calls, real = [], old_runs.prune
        old_runs.prune = lambda *args: calls.append(1) or real(*args)
        call(5); ledger.flush(); ledger.touch(now=True)
        assert not calls
    """)
    put(home, "mine", 2)
    put(home, "old", 31)
    finish("ledger.boot()", FLASHPATCH_RUN="mine")
    assert (home / "old").exists(), "this process joined a run"


def test_the_variables(home, finish):
    for days in range(1, 6):
        put(home, f"r{days}", days)
    finish("ledger.boot()", FLASHPATCH_RUN="a", FLASHPATCH_KEEP_DAYS="4.5")
    assert names(home) == ["a", "r1", "r2", "r3", "r4"]
    finish("ledger.boot()", FLASHPATCH_RUN="b", FLASHPATCH_KEEP_RUNS="4")
    assert names(home) == ["a", "b", "r1", "r2"]
    finish("ledger.boot()", FLASHPATCH_RUN="c", FLASHPATCH_KEEP_RUNS="0", FLASHPATCH_KEEP_DAYS="0")
    assert names(home) == ["a", "b", "c", "r1", "r2"]


@pytest.mark.parametrize("name", ["FLASHPATCH_KEEP_RUNS", "FLASHPATCH_KEEP_DAYS"])
@pytest.mark.parametrize("value", ["many", "-1", "nan"])
def test_a_value_that_is_no_number_removes_nothing(home, start, name, value):
    put(home, "old", 400)
    process = start("ledger.boot()", **{name: value})
    _, err = process.communicate()
    assert process.returncode == 0 and (home / "old").exists()
    assert f"{name}={value!r}" in err and err.count("\n") == 1
