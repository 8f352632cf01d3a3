"""The frame around the processes of all probes, on real ones: what they tell, why one failed, and that nothing is left."""

import os
from pathlib import Path

import pytest
from machine import limit, until

from flashpatch.ledger.files import process_start
from flashpatch.verify.probes import jobs
from flashpatch.verify.probes.jobs import Command, busyness, run

SLEEP = "import time; time.sleep(600)"
QUICK = limit(60)  # seconds that no process here takes


def python(name: str, code: str, **fields) -> Command:
    return Command(name, ["-c", code], **fields)


@pytest.mark.slow
def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    ended = run([jobs.job("fp8.job:nothing", tmp_path)], tmp_path, 100)
    assert "has no attribute 'nothing'" in ended.problem
    assert ended.problems == {"job": ended.problem} and ended.seen == {"job": {"failed": ended.problem}}


def test_a_fresh_job_has_no_flashpatch_and_may_fail_alone(tmp_path: Path) -> None:
    job, fresh = (jobs.job("fp8.job:updates", tmp_path, name) for name in ("job", jobs.FRESH))
    assert (job.stock, job.stops_others, fresh.stock, fresh.stops_others) == (False, True, True, False)


def test_what_a_job_has_done_is_told_while_it_goes_on(tmp_path: Path, monkeypatch) -> None:
    """The job waits for what is made when its line is heard."""
    code = (
        "import sys; from pathlib import Path; from flashpatch.verify.probes import jobs;here = Path(sys.argv[1]); "
        "jobs.tell(here, 'an engine is open');jobs.wait_for(here / 'heard'); jobs.tell(here, 'the last')"
    )
    lines: list[str] = []

    def hear(line: str) -> None:
        lines.append(line)
        (tmp_path / "heard").touch()

    monkeypatch.setattr(jobs, "hear", hear)
    ended = run([Command("job", ["-c", code, str(tmp_path)])], tmp_path, 100)
    assert not ended.problem and lines == ["an engine is open", "the last"]


def test_exit_statuses_and_the_ends_of_logs(tmp_path: Path) -> None:
    long = "import sys; print('x' * 5000); print('the end', file=sys.stderr); sys.exit(3)"
    commands = [python("good", "print('fine')"), python("bad", long, stops_others=False)]
    ended = run(commands, tmp_path, QUICK)
    bad = ended.problems["bad"]
    assert ended.problem == bad and not ended.problems["good"]
    assert bad.startswith("bad ended with status 3: ...xxx") and bad.endswith("the end") and len(bad) < 1000
    assert (tmp_path / "good.log").read_text() == "fine\n"


def test_a_time_out_kills_the_whole_process_group(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(jobs, "busyness", lambda: 1.0)
    parent = (
        f"import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\nprint(child.pid, "
        "flush=True)\ntime.sleep(600)"
    )
    log = tmp_path / "stuck.log"
    # Time passes once the child runs.
    monkeypatch.setattr(jobs.time, "monotonic", lambda: 9.0 * (log.exists() and bool(log.read_text())))
    ended = run([python("stuck", parent)], tmp_path, 5.0)
    monkeypatch.undo()
    child = int(log.read_text())
    assert ended.problem == f"stuck did not end within 5 s: ...{child}"
    until(lambda: process_start(child) is None)


def test_what_an_ended_process_left_behind_is_killed(tmp_path: Path) -> None:
    parent = f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {SLEEP!r}], stdout=subprocess.DEVNULL).pid)"
    assert not run([python("parent", parent)], tmp_path, QUICK).problem
    child = int((tmp_path / "parent.log").read_text())
    until(lambda: process_start(child) is None)


def test_the_number_of_an_ended_process_is_used_once(tmp_path: Path, monkeypatch) -> None:
    """While others run on, the system may give it to a process that is none of ours."""
    killed, real, seen = [], os.killpg, tmp_path / "seen"

    def kill(group: int, number: int) -> None:
        killed.append(group)
        seen.touch()
        real(group, number)

    monkeypatch.setattr(os, "killpg", kill)
    waits = f"import os, time\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.02)"
    assert not run([python("quick", ""), python("slow", waits)], tmp_path, QUICK).problem
    assert len(killed) == len(set(killed)) == 2


def test_the_time_out_is_scaled_while_the_machine_is_busy(tmp_path: Path, monkeypatch) -> None:
    factors = iter([1.0, 4.0])
    monkeypatch.setattr(jobs, "busyness", lambda: next(factors, 1.0))
    slow = run([python("slow", SLEEP)], tmp_path, 0.3)
    assert "did not end within 1 s" in slow.problem, "the largest counts"


def test_a_failure_kills_the_others_and_is_named_first(tmp_path: Path) -> None:
    ended = run([python("waits", SLEEP), python("fails", "raise SystemExit(2)")], tmp_path, QUICK)
    assert ended.problems["waits"] == "waits was killed, as fails had failed: ..."
    assert ended.problem.startswith("fails ended with status 2")


def test_one_that_may_fail_leaves_the_others_alone(tmp_path: Path) -> None:
    may_fail = python("fails", "raise SystemExit(2)", stops_others=False)
    ended = run([may_fail, python("works", "import time; time.sleep(1)")], tmp_path, QUICK)
    assert "status 2" in ended.problems["fails"] and not ended.problems["works"]


def test_the_environment_is_clean(tmp_path: Path, monkeypatch) -> None:
    for name in ("RANK", "MASTER_PORT", "FLASHPATCH_RUN", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "from outside")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    commands = [python("ours", code, environment={"EXTRA": "1"}), python("theirs", code, stock=True)]
    run(commands, tmp_path, QUICK)
    ours, theirs = ((tmp_path / f"{name}.log").read_text() for name in ("ours", "theirs"))
    assert ours.count("from outside") == 1 and '"FLASHPATCH_RUN": "from outside"' in ours
    assert '"EXTRA": "1"' in ours and '"HF_HUB_OFFLINE": "1"' in ours
    assert "FLASHPATCH" not in theirs and os.environ["PATH"] in theirs


def test_ranks_meet_in_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "toy-rank.meet").touch()
    first, second = (one.environment for one in jobs.ranks("toy:rank", tmp_path, environment={"EXTRA": "1"}))
    assert (first["RANK"], second["RANK"], second["WORLD_SIZE"], first["EXTRA"]) == ("0", "1", "2", "1")
    assert {one["DIST_INIT_METHOD"] for one in (first, second)} == {f"file://{tmp_path}/toy-rank.meet"}
    assert not (tmp_path / "toy-rank.meet").exists(), "a file of an earlier meeting would be joined"


def test_the_factor_lies_between_1_and_8(monkeypatch) -> None:
    for waiting, factor in ((0.1, 1.0), (3.0, 3.0), (40.0, 8.0)):
        load = waiting * len(os.sched_getaffinity(0))
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert busyness() == pytest.approx(factor)
