"""Reading a ledger back: grouped by run, and trusting nothing that could be someone else's."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashpatch import PatchError, ledger
from flashpatch.ledger import files, runs


def row(pid: int = 1, start: str = "5", **values) -> dict:
    here = {"run": "r", "host": "h", "pid": pid, "start": start, "ppid": 0, "argv0": "python"}
    return {**files.row({}), **here, "roles": ["worker"], **values}


def expectation(pid: int, start: str = "", **values) -> dict:
    return {"host": "h", "pid": pid, "start": start, "roles": [], "families": ["toy"], "by": 1, **values}


def put(home: Path, run: str, name: str, value: object) -> Path:
    path = home / run / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_runs_come_oldest_first(tmp_path):
    for age, run in ((30, "b"), (10, "c"), (20, "a")):
        path = put(tmp_path, run, "row-h-1-5", row())
        os.utime(path, (time.time() - age,) * 2)
    assert [run.id for run in ledger.read(tmp_path)] == ["b", "a", "c"]


def test_one_choice_of_the_newest_job(tmp_path):
    me, (pid, start) = files.host(), files.identity()
    living = {"pid": 1, "host": me, "start": files.process_start(1)}
    assert runs.choose(tmp_path) is None is runs.choose(tmp_path, "any")
    put(tmp_path, "old", f"row-{me}-1-{living['start']}", row(**living))
    put(tmp_path, "second", f"row-{me}-{pid}-{start}", row(pid, start, host=me))
    for age, name in ((30, "older"), (20, "new"), (10, "watched")):
        put(tmp_path, name, "row-h-1-5", row(argv0="/usr/bin/flashpatch" if name == "watched" else "python"))
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    os.utime(tmp_path / "old", (time.time() - 40,) * 2)
    os.utime(tmp_path / "second", (time.time() - 50,) * 2)
    assert runs.choose(tmp_path) == tmp_path / "second", "of two that live it began last"
    shutil.rmtree(tmp_path / "second")
    assert runs.choose(tmp_path) == tmp_path / "old", "its process lives"
    shutil.rmtree(tmp_path / "old")
    assert runs.choose(tmp_path) == tmp_path / "new", "a command of ours is no job"
    assert runs.choose(tmp_path, "older") == tmp_path / "older"
    with pytest.raises(PatchError, match=r"no run gone in .* The newest runs there are: watched, new, older"):
        runs.choose(tmp_path, "gone")


def test_expected_minus_present(tmp_path):
    put(tmp_path, "r", "row-h-1-5", row(1, "5"))
    put(tmp_path, "r", "expect-h-1-5", expectation(1, "5"))
    put(tmp_path, "r", "expect-h-1-unknown", expectation(1))
    put(tmp_path, "r", "expect-h-1-4", expectation(1, "4"))
    put(tmp_path, "r", "expect-h-2-7", expectation(2, "7"))
    [run] = ledger.read(tmp_path)
    assert [(missing.pid, missing.start) for missing in run.missing] == [(1, "4"), (2, "7")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", ""),
        (json.dumps({"kind": "row"}), "no key"),
        (json.dumps(row(pid="many")), "pid is str"),
        (json.dumps(row(patches=3)), ""),
    ],
)
def test_a_broken_file_is_reported_and_the_rest_is_read(tmp_path, text, why):
    put(tmp_path, "r", "row-h-1-5", row())
    put(tmp_path, "r", "row-h-2-5", text)
    [run] = ledger.read(tmp_path)
    assert len(run.rows) == 1
    [problem] = run.problems
    assert problem.startswith("r/row-h-2-5.json: ") and why in problem


def test_links_lead_nowhere(tmp_path):
    home, outside = tmp_path / "home", tmp_path / "outside"
    real = put(outside, "r", "row-h-1-5", row())
    put(home, "r", "row-h-2-5", row(2))
    (home / "r" / "row-h-3-5.json").symlink_to(real)
    (home / "linked").symlink_to(real.parent)
    [run] = ledger.read(home)
    assert [found.pid for found in run.rows] == [2]
    assert "row-h-3-5.json" in run.problems[0]


def test_a_pipe_does_not_hang_the_reader(tmp_path):
    put(tmp_path, "r", "row-h-1-5", row())
    os.mkfifo(tmp_path / "r" / "row-h-2-5.json")
    [run] = ledger.read(tmp_path)
    assert run.problems == ["r/row-h-2-5.json: not a plain file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_row_is_not_trusted(tmp_path):
    os.chown(put(tmp_path, "r", "row-h-1-5", row()), 65534, -1)
    [run] = ledger.read(tmp_path)
    assert run.rows == []
    assert run.problems == ["r/row-h-1-5.json: owned by user 65534, not trusted"]


def test_a_huge_file_is_not_read(tmp_path):
    with open(put(tmp_path, "r", "row-h-1-5", row()), "r+b") as file:
        file.truncate(1 << 30)
    [run] = ledger.read(tmp_path)
    assert "more than 4194304" in run.problems[0]


def test_unfinished_files_are_ignored(tmp_path):
    put(tmp_path, "r", ".row-h-1-5.json.77", "{")
    put(tmp_path, "r", "notes", "{")
    assert ledger.read(tmp_path) == []


def test_alive_means_the_same_process(tmp_path):
    host = files.host()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    begun = files.process_start(child.pid)
    put(tmp_path, "r", "row-a", row(child.pid, begun, host=host))
    put(tmp_path, "r", "row-b", row(child.pid, "1", host=host))
    put(tmp_path, "r", "row-c", row(child.pid, begun, host="elsewhere"))
    put(tmp_path, "s", f"row-{host}-{child.pid}-{begun}", row(child.pid, begun, host=host))
    run, [read] = (
        next(one for one in ledger.read(tmp_path) if one.id == "r"),
        runs.read_run(tmp_path / "s").rows,
    )
    assert [found.alive for found in run.rows] == [True, False, None]
    child.kill()
    while files.process_start(child.pid) is not None:  # a zombie is not alive
        time.sleep(0.01)
    assert [found.alive for found in run.rows] == [False, False, None]
    assert read.alive, "its last word came after that"
    child.communicate()
