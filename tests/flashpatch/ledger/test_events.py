"""Timed events, written by real processes and read back."""

import signal
from pathlib import Path

import pytest
import run_events
from machine import limit


def only(home: Path) -> run_events.ProcessEvents:
    [run] = home.iterdir()
    [process], problems = run_events.read(run)
    assert problems == []
    return process


def test_events_carry_number_time_and_facts(finish, home: Path) -> None:
    out = finish("""
        ledger.boot()
        print(time.time())
        ledger.event("update", version=1, seconds=0.25, n=9, missing=None)
        print(time.time())
        ledger.sample("speculation", drafted=5)
    """)
    first, second = only(home).events
    before, after = map(float, out.split())
    assert before - 0.01 <= first.pop("t") <= after + 0.01 and second["sample"]
    assert first == {"n": 1, "event": "update", "version": 1, "seconds": 0.25}
    assert (second["n"], second["drafted"]) == (2, 5)


def test_nothing_is_lost_between_threads_and_processes(finish, home: Path) -> None:
    finish("""
        import threading
        ledger.boot()
        child = os.fork()
        def write(thread):
            for number in range(200):
                ledger.event("update", thread=thread, number=number)
        threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        if child:
            os.waitpid(child, 0)
        else:
            os._exit(0)
    """)
    [run] = home.iterdir()
    found, _ = run_events.read(run)
    assert len(found) == 2
    for process in found:
        assert [event["n"] for event in process.events] == list(range(1, 801))
        assert len({(event["thread"], event["number"]) for event in process.events}) == 800


def test_the_file_stays_bounded_and_counts_what_is_gone(finish, home: Path) -> None:
    finish(
        """
        ledger.boot()
        for number in range(3000):
            ledger.event("update", version=number)
            ledger.sample("speculation", number=number)
        """,
        FLASHPATCH_EVENT_BYTES="20000",
    )
    process = only(home)
    [run] = home.iterdir()
    for kind in ("events", "samples"):
        sizes = [path.stat().st_size for path in run.glob(f"{kind}-*")]
        assert len(sizes) == 2 and max(sizes) < 10200, "half each, and the line that counts what is gone"
    assert len(process.events) + process.dropped + process.dropped_samples == 6000
    assert process.dropped and process.dropped_kinds == {"update": process.dropped}
    last = [event["n"] for event in process.events if event["event"] == "update"]
    assert last == list(range(2 * process.dropped + 1, 6000, 2)), "the newest, and none missing between them"


def test_a_signal_handler_that_records_loses_nothing(finish, home: Path) -> None:
    finish("""
        import signal
        ledger.boot()
        count = 0
        def handler(*_):
            global count
            count += 1
            ledger.event("handled", number=count)
        signal.signal(signal.SIGALRM, handler)
        number = 0
        while count < 100:
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + number % 97 * 1e-5)
            for _ in range(20):
                number += 1
                ledger.event("update", number=number)
        signal.setitimer(signal.ITIMER_REAL, 0)
        ledger.event("ended", handled=count, updates=number)
    """)
    process = only(home)
    assert [event["n"] for event in process.events] == list(range(1, len(process.events) + 1))
    ended = process.events[-1]
    for name, many in (("handled", ended["handled"]), ("update", ended["updates"])):
        assert [e["number"] for e in process.events if e["event"] == name] == list(range(1, many + 1))


def test_a_signal_handler_meets_no_lock_that_its_thread_holds(start, home: Path) -> None:
    process = start("""
        import signal, threading
        notify_all = threading.Condition.notify_all
        def interrupted(condition):
            if threading.current_thread() is threading.main_thread():  # which holds the lock of an Event, as Timer has one
                os.kill(os.getpid(), signal.SIGALRM)
            notify_all(condition)
        signal.signal(signal.SIGALRM, lambda *_: ledger.event("handled"))
        ledger.boot()
        call(2)  # a second is written later
        threading.Condition.notify_all = interrupted
        ledger.event("sent")  # with which the row is written sooner
        print("goes on", flush=True)
        os._exit(0)
    """)
    out, err = process.communicate(timeout=limit(60))
    assert (out, err) == ("goes on\n", "")
    assert only(home).events[0]["event"] == "sent"


def test_equal_events_within_a_second_are_counted(finish, home: Path) -> None:
    finish("""
        ledger.boot()
        for _ in range(50):
            ledger.event("refused", problem="asleep")
        ledger.event("update", version=1)
    """)
    events = only(home).events
    assert [event["event"] for event in events if event["event"] == "update"] == ["update"]
    assert sum(1 + event.get("repeated", 0) for event in events) == 51
    assert len(events) < 51


def test_what_a_killed_process_wrote_is_there(start, home: Path) -> None:
    process = start("""
        ledger.boot()
        for number in range(100):
            ledger.event("update", version=number)
        print("written", flush=True)
        time.sleep(600)
    """)
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    [run] = home.iterdir()
    [path] = run.glob("events-*")
    path.write_bytes(path.read_bytes()[:-5])  # a line that was cut short
    found = only(home)
    assert len(found.events) == 99 and found.unreadable == 1


@pytest.mark.parametrize("value", ["0", "many"])
def test_events_are_switched_off_and_a_wrong_value_is_no_fault_of_the_job(start, home: Path, value: str):
    process = start("ledger.boot(); ledger.event('a'); ledger.event('b')", FLASHPATCH_EVENT_BYTES=value)
    _, err = process.communicate(timeout=limit(60))
    assert process.returncode == 0
    [run] = home.iterdir()
    assert run_events.read(run) == ([], [])
    assert err.count("FLASHPATCH_EVENT_BYTES") == (value == "many")


def test_an_event_too_long_is_named_only(finish, home: Path) -> None:
    finish("""
        ledger.boot()
        ledger.event("refused", problem="x" * 100_000)
        ledger.event("refused", layers=["x" * 1000] * 100)
    """)
    short, named = only(home).events
    assert len(short["problem"]) == 2000
    assert named["too_long"] > 100_000 and "layers" not in named


def test_a_file_system_that_does_not_answer_holds_nobody_up(start, home: Path) -> None:
    process = start("""
        import threading
        from flashpatch.ledger import events, writer
        ledger.boot()
        ledger.event("before")
        path = events.event_path()
        os.rename(path, path + ".kept")
        os.mkfifo(path, 0o600)  # nobody reads it, so who opens it to write waits
        writer.MOST = 50
        done = threading.Event()
        def step():
            for number in range(1000):
                ledger.event("update", number=number)
                ledger.note(steps=number)
            ledger.flush()
            done.set()
        threading.Thread(target=step, daemon=True).start()
        print("done" if done.wait(60) else "it waits", flush=True)
        os.rename(path, path + ".fifo")
        os.rename(path + ".kept", path)
        reader = os.open(path + ".fifo", os.O_RDONLY | os.O_NONBLOCK)  # now it answers
        while writer.writer.hangs:
            time.sleep(0.01)
        ledger.event("after")
        os.close(reader)
    """)
    out, err = process.communicate(timeout=limit(90))
    assert out == "done\n" and err.count("does not answer, and too many wait") == 1
    process = only(home)
    assert [process.events[at]["event"] for at in (0, -1)] == ["before", "after"]
    assert process.lost > 900 and len(process.events) + process.lost == 1001


@pytest.mark.parametrize(
    ("forks", "many"), [(50, 20_000), pytest.param(10_000, 1_000_000, marks=pytest.mark.full)]
)
def test_a_long_life_keeps_files_and_memory_bounded(start, home: Path, forks: int, many: int) -> None:
    process = start(
        f"""
        import resource, signal
        ledger.boot()
        signal.signal(signal.SIGALRM, lambda *_: ledger.event("handled"))
        def live(forks, many):
            for number in range(forks):
                child = os.fork()
                if not child:
                    os._exit(0)
                os.waitpid(child, 0)
            for number in range(many):
                if number % 1000 == 0:
                    signal.setitimer(signal.ITIMER_REAL, 1e-4)
                ledger.sample("speculation", number=number)
                ledger.note(steps=number)
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before = live(20, 10_000)
        print(live({forks}, {many}) - before, len(os.listdir("/proc/self/task")))
        """,
        FLASHPATCH_EVENT_BYTES="200000",
    )
    out, err = process.communicate(timeout=limit(1200))
    assert err == ""
    grown, threads = map(int, out.split())
    assert grown < 16 << 10 and threads < 5  # KiB
    [run] = home.iterdir()
    files = list(run.iterdir())
    assert len(files) <= 6 and sum(path.stat().st_size for path in files) < 1 << 20
