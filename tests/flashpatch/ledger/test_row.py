"""When a process writes its row, what is in it, and what happens when it cannot."""

import os
import subprocess
import sys

import pytest
from machine import limit, until

from flashpatch import ledger
from flashpatch.ledger import files
from flashpatch.ledger.runs import Row


def only_row(home) -> Row:
    [run] = ledger.read(home)
    assert run.problems == []
    [row] = run.rows
    return row


def calls(row: Row) -> int:
    return row.patches["toy.toy.f"]["calls"]


def wait_for(process, word: str) -> None:
    assert process.stdout.readline().strip() == word


def test_a_driver_and_an_engine_say_once_what_is_on_and_where_the_proof_will_be(home):
    code = """
import flashpatch
from flashpatch import ledger
from flashpatch.ledger import files
flashpatch.enable("fp8", in_flight="recompute")
for role in ("worker", "driver", "engine-core", "driver"):
    ledger.role(role)
"""
    env = {**os.environ, "FLASHPATCH_LEDGER": str(home), "FLASHPATCH_RUN": "told", "FLASHPATCH_STRCIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    said, unknown = [line for line in done.stderr.splitlines() if line.startswith("flashpatch: ")]
    assert "fp8 (in_flight=recompute) on in this driver" in said
    assert said.endswith("proof: flashpatch-verify --live --run told")
    assert unknown.endswith("FLASHPATCH_STRCIT is no variable of FlashPatch; did you mean FLASHPATCH_STRICT?")


def test_a_row_tells_what_the_process_is(home, finish):
    finish("""
        ledger.boot()
        ledger.role("worker", tp=1)
        ledger.role("driver", dp=0)
        ledger.note(updates=2)
        ledger.note(seen={"shape": (3, 4), "dtype": int})
    """)
    row = only_row(home)
    assert row.roles == ("driver", "worker")
    assert row.rank == {"tp": 1, "dp": 0}
    assert row.notes == {"updates": 2, "seen": {"shape": [3, 4], "dtype": "<class 'int'>"}}
    assert row.versions["toy"] == "1.0"
    assert row.argv0.endswith("script.py")
    assert row.ppid == os.getpid()
    assert row.alive is False


def test_an_orphan_names_who_had_started_it(monkeypatch):
    """Else nobody knows later that it was left behind."""
    monkeypatch.setattr(files, "_process", None)
    parent = files.row({})["ppid"]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert files.row({})["ppid"] == parent


def test_nothing_is_written_before_boot(home, finish):
    finish('ledger.role("worker"); ledger.event("sent"); call(3); ledger.expect(1); ledger.flush()')
    assert not home.exists()


def test_the_first_call_is_on_disk_before_it_returns(home, start):
    process = start('ledger.boot(); call(); print("called", flush=True); time.sleep(60)')
    wait_for(process, "called")
    process.kill()
    process.communicate()
    assert calls(only_row(home)) == 1


def test_a_killed_process_has_counted_what_its_events_say(home, start):
    process = start("""
        from flashpatch.ledger import row
        row._INTERVAL = 3600.0
        ledger.boot()
        call(7)
        ledger.event("sent")
        print("sent", flush=True)
        sys.stdin.read()
    """)
    wait_for(process, "sent")
    until(lambda: calls(only_row(home)) == 7)
    process.kill()
    process.communicate()
    assert calls(only_row(home)) == 7


def test_an_idle_process_loses_no_call(home, start):
    process = start('ledger.boot(); call(7); print("called", flush=True); sys.stdin.read()')
    wait_for(process, "called")
    until(lambda: calls(only_row(home)) == 7)
    assert only_row(home).alive is True
    process.kill()
    process.communicate()


def test_calls_do_not_each_write(finish):
    out = finish("""
        from flashpatch.ledger import files as ledger_files, row
        written = []
        real = ledger_files.write
        ledger_files.write = lambda *a: (written.append(1), real(*a))
        row._INTERVAL = 3600.0
        ledger.boot()
        call(50_000)
        print(len(written))
    """)
    assert int(out) <= 3  # at boot, at the first call, and one more for a timer that ran out in between


def test_an_engine_lock_held_around_calls_does_not_deadlock(home, finish):
    finish("""
        import threading
        lock = threading.RLock()
        inner = engine.snapshot
        def snapshot():
            with lock:
                time.sleep(0.001)
                return inner()
        engine.snapshot = snapshot
        ledger.boot()
        def work():
            for _ in range(300):
                with lock:
                    engine.calls += 1
                    ledger.touch(now=True)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    """)
    assert calls(only_row(home)) == 1200


def test_the_run_id_cannot_leave_the_ledger(home, finish):
    finish("ledger.boot()", FLASHPATCH_RUN="../../else where")
    assert [folder.name for folder in home.iterdir()] == ["-..-else-where"]
    assert sorted(path.name for path in home.parent.iterdir()) == ["ledger", "script.py"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_each_multiprocessing_child_writes_its_own_row(home, finish, method):
    finish(f"""
        import multiprocessing
        def work():
            ledger.boot()
            ledger.role("worker")
            call(5)
        if __name__ == "__main__":
            ledger.boot()
            ledger.role("driver")
            call(3)
            child = multiprocessing.get_context("{method}").Process(target=work)
            child.start(); child.join()
            call(2)
    """)
    [run] = ledger.read(home)
    by_role = {row.roles: row for row in run.rows}
    assert calls(by_role["driver",]) == 5
    assert calls(by_role["worker",]) == 5
    assert by_role["worker",].pid != by_role["driver",].pid


def test_a_forked_child_in_which_nothing_happens_leaves_no_row(home, finish):
    finish("""
        ledger.boot()
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                sys.exit()
            os.waitpid(pid, 0)
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start(); child.join()
    """)
    assert only_row(home).ppid == os.getpid()


def test_the_run_begins_in_the_first_process_that_writes_a_row(home, finish):
    finish("""
        import subprocess
        from flashpatch.ledger import files
        files.row_path()  # as each interpreter that starts: it names the run to its children
        subprocess.run([sys.executable, "-c", "from flashpatch import ledger; ledger.boot()"])
    """)
    assert only_row(home).first


def test_a_full_disk_never_breaks_the_job(home, start):
    process = start("""
        import logging; logging.basicConfig(format="%(message)s")
        import resource; hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        ledger.boot()
        for _ in range(5): ledger.touch(now=True)
        print(ledger.problem())
        """)
    out, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0, err
    assert "File too large" in out
    assert err.count("cannot be written") == 1
    [run] = home.iterdir()
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_a_ledger_recovers(home, finish):
    home.parent.mkdir(exist_ok=True)
    out = finish("""
        import logging; logging.disable()
        from pathlib import Path
        home = Path(os.environ["FLASHPATCH_LEDGER"])
        home.write_text("in the way")
        ledger.boot(); call(3); ledger.expect(1)
        print(bool(ledger.problem()), home.read_text())
        home.unlink()
        ledger.touch(now=True)
        print(ledger.problem())
    """)
    assert out == "True in the way\nNone\n"
    only_row(home)


def test_a_snapshot_that_raises_is_recorded(home, finish):
    finish("""
        def snapshot(): raise LookupError("no table")
        engine.snapshot = snapshot
        ledger.boot()
    """)
    assert only_row(home).error == "this row is incomplete: LookupError('no table')"


def test_a_run_directory_that_is_a_link_is_refused(home, tmp_path, finish):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    home.mkdir()
    (home / "mine").symlink_to(elsewhere)
    out = finish(
        "import logging; logging.disable(); ledger.boot(); print(ledger.problem())", FLASHPATCH_RUN="mine"
    )
    assert "is not a directory of this user" in out
    assert list(elsewhere.iterdir()) == []
