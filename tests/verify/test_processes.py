"""The runner of the probes' processes, on real ones."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import limit

from flashpatch.verify import processes
from flashpatch.verify.processes import Command, busyness, problems, rank_environments, run

SLEEP = "import time; time.sleep(600)"
QUICK = limit(60)  # seconds that no process here takes


def python(name: str, code: str, **fields) -> Command:
    return Command(name, ["-c", code], **fields)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + QUICK
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_exit_statuses_and_the_ends_of_logs(tmp_path):
    long = "import sys; print('x' * 5000); print('the end', file=sys.stderr); sys.exit(3)"
    commands = [python("good", "print('fine')"), python("bad", long, stops_others=False)]
    endings = run(commands, tmp_path, QUICK)
    assert (endings["good"].status, endings["good"].problem) == (0, "")
    assert endings["bad"].status == 3
    assert endings["bad"].problem.startswith("bad ended with status 3: ...xxx")
    assert endings["bad"].problem.endswith("the end") and len(endings["bad"].problem) < 1000
    assert problems(endings) == endings["bad"].problem
    assert (tmp_path / "good.log").read_text() == "fine\n"


def test_a_time_out_kills_the_whole_process_group(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "busyness", lambda: 1.0)
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    log = tmp_path / "stuck.log"
    # Time passes once the child runs.
    monkeypatch.setattr(processes.time, "monotonic", lambda: 9.0 * bool(log.read_text()))
    endings = run([python("stuck", parent)], tmp_path, 5.0)
    monkeypatch.undo()
    child = int(log.read_text())
    assert endings["stuck"].status is None
    assert endings["stuck"].problem == f"stuck did not end within 5 s: ...{child}"
    assert wait_for(lambda: not is_alive(child))


def test_what_an_ended_process_left_behind_is_killed(tmp_path):
    parent = (
        "import subprocess, sys\n"
        f"print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}], stdout=subprocess.DEVNULL).pid)"
    )
    assert problems(run([python("parent", parent)], tmp_path, QUICK)) == ""
    child = int((tmp_path / "parent.log").read_text())
    assert wait_for(lambda: not is_alive(child))


def test_the_number_of_an_ended_process_is_used_once(tmp_path, monkeypatch):
    """While others run on, the system may give it to a process that is none of ours."""
    killed, real, seen = [], os.killpg, tmp_path / "seen"

    def kill(group: int, number: int) -> None:
        killed.append(group)
        seen.touch()
        real(group, number)

    monkeypatch.setattr(os, "killpg", kill)
    waits = f"import os, time\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.02)"
    assert problems(run([python("quick", ""), python("slow", waits)], tmp_path, QUICK)) == ""
    assert len(killed) == len(set(killed)) == 2


def test_the_time_out_is_scaled_while_the_machine_is_busy(tmp_path, monkeypatch):
    factors = iter([1.0, 4.0])
    monkeypatch.setattr(processes, "busyness", lambda: next(factors, 1.0))
    endings = run([python("slow", SLEEP)], tmp_path, 0.3)
    assert "did not end within 1 s" in endings["slow"].problem, "the largest counts"


def test_a_failure_kills_the_others_and_is_named_first(tmp_path):
    endings = run([python("waits", SLEEP), python("fails", "raise SystemExit(2)")], tmp_path, QUICK)
    assert endings["waits"].problem == "waits was killed, as fails had failed: ..."
    assert problems(endings).startswith("fails ended with status 2")


def test_one_that_may_fail_leaves_the_others_alone(tmp_path):
    commands = [
        python("fails", "raise SystemExit(2)", stops_others=False),
        python("works", "import time; time.sleep(1)"),
    ]
    endings = run(commands, tmp_path, QUICK)
    assert [endings[name].status for name in ("fails", "works")] == [2, 0]


def test_processes_are_killed_when_the_probe_is_interrupted(tmp_path, monkeypatch):
    log = tmp_path / "stuck.log"

    def interrupted() -> float:
        if log.read_text():
            raise KeyboardInterrupt
        return 8.0

    monkeypatch.setattr(processes, "busyness", interrupted)
    code = f"import os; print(os.getpid(), flush=True); {SLEEP}"
    with pytest.raises(KeyboardInterrupt):
        run([python("stuck", code)], tmp_path, QUICK)
    assert not is_alive(int(log.read_text()))


def test_the_environment_is_clean(tmp_path, monkeypatch):
    for name in ("RANK", "MASTER_PORT", "FLASHPATCH_RUN", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "from outside")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    commands = [python("ours", code, environment={"EXTRA": "1"}), python("theirs", code, stock=True)]
    run(commands, tmp_path, QUICK)
    ours, theirs = ((tmp_path / f"{name}.log").read_text() for name in ("ours", "theirs"))
    assert ours.count("from outside") == 1 and '"FLASHPATCH_RUN": "from outside"' in ours
    assert '"EXTRA": "1"' in ours and '"HF_HUB_OFFLINE": "1"' in ours
    assert "FLASHPATCH" not in theirs and os.environ["PATH"] in theirs


def test_ranks_meet_in_the_working_directory(tmp_path):
    (tmp_path / "meet").touch()
    first, second = rank_environments(tmp_path, 2)
    assert (first["RANK"], second["RANK"], second["WORLD_SIZE"]) == ("0", "1", "2")
    assert {first["DIST_INIT_METHOD"], second["DIST_INIT_METHOD"]} == {f"file://{tmp_path}/meet"}
    assert not (tmp_path / "meet").exists(), "a file of an earlier meeting would be joined"


def test_the_factor_lies_between_1_and_8(monkeypatch):
    for waiting, factor in ((0.1, 1.0), (3.0, 3.0), (40.0, 8.0)):
        load = waiting * len(os.sched_getaffinity(0))
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert busyness() == pytest.approx(factor)
