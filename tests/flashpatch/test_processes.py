"""Forks, spawned children, threads, and everything else that makes a process start twice or count wrongly."""

import json

import pytest


def rows(world):
    """This world's ledger rows, by argv-independent pid."""
    return [json.loads(path.read_text()) for path in world.ledger.glob("*/row-*.json")]


def test_concurrent_calls_are_counted_exactly(toys):
    toys.run("""
        import sys, threading, flashpatch, fakefw.core as core
        sys.setswitchinterval(1e-6)
        flashpatch.enable("toy")
        def work():
            for _ in range(5000):
                core.plain(1)
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert flashpatch.status()["toy.fakefw.plain"].calls <= 40000
        assert flashpatch.status()["toy.fakefw.plain"].calls == 40000
        assert str(flashpatch.status()["toy.fakefw.plain"].state) == "live(40000 calls)"
    """)


def test_threads_that_enable_and_disable_leave_no_trace(toys):
    toys.run("""
        import sys, flashpatch, fakefw.core as core
        from concurrent.futures import ThreadPoolExecutor
        sys.setswitchinterval(1e-6)
        def work():
            for _ in range(40):
                flashpatch.enable("toy"), core.plain(1), flashpatch.disable("toy")
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda _: work(), range(4)))
        assert core.plain is core.BORN["plain"]
    """)


def test_forked_child_counts_from_zero_and_writes_its_own_row(toys):
    toys.run("""
        import os, flashpatch, fakefw.core as core
        from flashpatch import ledger
        flashpatch.enable("toy")
        ledger.role("driver"), ledger.note(updates=1)
        for _ in range(3):
            core.plain(1)
        pid = os.fork()
        if pid == 0:
            assert flashpatch.status()["toy.fakefw.plain"].calls == 0 and core.plain(1) == ("patched", 2)
            assert flashpatch.status()["toy.fakefw.plain"].calls == 1
            ledger.flush()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0 and flashpatch.status()["toy.fakefw.plain"].calls == 3
        ledger.flush()
    """)
    found = rows(toys)
    assert len(found) == 2 and len({row["run"] for row in found}) == 1
    found.sort(key=lambda row: row["patches"]["toy.fakefw.plain"]["calls"])
    assert [row["patches"]["toy.fakefw.plain"]["calls"] for row in found] == [1, 3]
    assert [(row["roles"], row["notes"].get("updates")) for row in found] == [([], None), (["driver"], 1)]
    for row in found:
        assert row["patches"]["toy.fakefw.plain"]["state"] == "live"
        assert row["patches"]["toy.fakefw.plain"]["tested"] is True
        assert row["versions"]["fakefw-cpu"] == "1.2.0"


def test_fork_while_other_threads_hold_every_lock(toys):
    toys.run("""
        import os, threading, time, flashpatch, fakefw.core as core
        from flashpatch import engine
        flashpatch.enable("toy")
        held = threading.Event()
        def hold():
            with engine.switching, engine.manager._lock:
                held.set()
                time.sleep(1)
        threading.Thread(target=hold).start()
        held.wait()
        pid = os.fork()
        if pid == 0:
            flashpatch.disable()
            assert core.plain is core.BORN["plain"]
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    """)


def test_a_signal_handler_may_ask_for_counts(toys):
    toys.run("""
        import signal
        from flashpatch.arming.call_counter import CallCounter
        counter, handled = CallCounter("toy.fakefw.plain"), []
        signal.signal(signal.SIGALRM, lambda *_: handled.append(counter.calls()))
        while len(handled) < 50:
            signal.setitimer(signal.ITIMER_REAL, 1e-4)
            assert {counter.calls() for _ in range(200)} == {0}
        assert {*handled} == {0}
    """)


CHILD = "import flashpatch.bootstrap as b; b.start(); import fakefw.core as c; print(c.plain(1))"

SPAWN = f"""
    import os, subprocess, sys
    def child(**env):
        done = subprocess.run(
            [sys.executable, "-c", {CHILD!r}], env=dict(os.environ, **env), capture_output=True, text=True,
            cwd="/",
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()
"""


def test_spawned_children_get_the_selection_and_may_decline(toys):
    code = """
    import flashpatch
    flashpatch.enable("toy")
    assert child() == "('patched', 2)"
    assert child(FLASHPATCH="0") == child(FLASHPATCH="") == child(FLASHPATCH="other") == "2"
    flashpatch.disable()
    assert child() == "2"
    """
    toys.run(SPAWN + code)
    patched = [row for row in rows(toys) if row["patches"].get("toy.fakefw.plain", {}).get("calls")]
    assert len(patched) == 1


REFUSING = """
import sys, flashpatch
from flashpatch.bootstrap import start
start()
import fakefw.core as core
try:
    core.Thing().method(1)
except flashpatch.PatchError as error:
    print(error)
flashpatch.enable("toy")
print(core.Thing().method(1), core.plain(1))
"""


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("tox", "'toy'"), ("FlashRL", "'fp8'"), ("toy; other", "'toy,other'"), ("fakefw", "toy, toy8, other")],
)
def test_an_engine_refuses_to_run_on_a_typing_error(toys, typed, meant):
    source, option = (toys.site / "toys.py").read_text(), 'options={"scale": Option(2'
    toys.module("toys.py", source.replace(option, f'refuses=("fakefw.core:Thing.method",), {option}'))
    done = toys.run(REFUSING, FLASHPATCH=typed)
    said, after = done.stdout.splitlines()
    assert said.startswith(f"[flashpatch] unknown name {typed!r}. Did you mean {meant}?"), said
    assert after == "2 ('patched', 2)", "what is switched on instead counts"
    assert done.stderr.splitlines() == [said], done.stderr


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_plain_interpreter_goes_on_after_a_typing_error_with_one_line(toys, strict):
    done = toys.run("print(1)", anew=True, FLASHPATCH="tox", FLASHPATCH_STRICT=strict)
    assert done.stdout == "1\n" and len(done.stderr.splitlines()) == 1, done.stderr


def test_bootstrap_that_cannot_obey_raises_in_strict_mode(toys):
    strict = toys.under(FLASHPATCH="tox", FLASHPATCH_STRICT="1")
    done = strict("from flashpatch.bootstrap import start; start()", fails=True)
    assert "PatchError" in done.stderr
