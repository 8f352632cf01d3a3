"""A server and launchers, without Ray: what a forked process takes over, and how both end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tree import SUPPORT

from flashpatch.patches.cpu.warm import server, session

pytestmark = [pytest.mark.verl, pytest.mark.full]  # of the experiment `fork_workers`

SPAWNED = "--multiprocessing-fork"
FLAGS = subprocess._args_from_interpreter_flags()
LOADED = "import sys; loaded = 'decimal' in sys.modules; "


class Started:
    """One server, with a process that stands for the raylet."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.folder = folder
        self.script = session.write_script(folder)
        self.inherited = dict(os.environ)  # pytest changes its own in the middle of a test
        self.raylet = subprocess.Popen(["sleep", "600"])
        self.server = subprocess.Popen(
            [sys.executable, *FLAGS, SUPPORT / "fork_server.py", folder, *modules],
            stdin=subprocess.PIPE,
            stderr=(folder.parent / "said").open("w"),
            text=True,
            env=self.environment(),
        )
        self.server.stdin.write(f"{self.raylet.pid} 01000000\n")
        self.server.stdin.close()

    def environment(self, **extra: str) -> dict[str, str]:
        return {
            **self.inherited,
            "FLASHPATCH": "0",
            "RAY_RAYLET_PID": str(self.raylet.pid),
            "RAY_JOB_ID": "01000000",
            **extra,
        }

    def run(self, code: str, **options) -> subprocess.Popen[str]:
        """Start code as ``multiprocessing`` starts its processes."""
        extra = options.pop("extra", {})
        options = {"stdout": subprocess.PIPE, "text": True, "env": self.environment(**extra), **options}
        return subprocess.Popen([self.script, *FLAGS, "-c", LOADED + code, SPAWNED], **options)

    def end(self) -> None:
        for process in (self.raylet, self.server):
            process.kill()
            process.wait()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    (tmp_path / "folder").mkdir()
    made = Started(tmp_path / "folder")
    end = time.monotonic() + 60
    while not (made.folder / server.SOCKET).exists() and time.monotonic() < end:
        time.sleep(0.02)
    yield made
    made.end()


def wait_for(condition: Callable[[], object], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


LOOK = """
import json, os, signal
os.write({pipe}, json.dumps(dict(
    loaded=loaded, argv=sys.argv, folder=os.getcwd(), rank=os.environ["RANK"], mine=os.environ.get("MINE"),
    group=os.getpgid(0), session=os.getsid(0), usr1=signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN,
    blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), nice=os.getpriority(os.PRIO_PROCESS, 0),
    umask=os.umask(0), name=__name__, path=sys.path, flags=str(sys.flags), parent=os.getppid())).encode())
print(sys.stdin.read() + "!")
"""


def look(started: Started, folder: Path, **extra: str) -> dict:
    """What a process sees that was started with a folder, pipe, signals, group and nice of its own."""
    reader, writer = os.pipe()

    def before() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        os.setpgid(0, 0)
        os.nice(1)
        os.umask(0o027)

    process = started.run(
        LOOK.format(pipe=writer),
        stdin=subprocess.PIPE,
        pass_fds=[writer],
        cwd=folder,
        extra=extra,
        preexec_fn=before,
    )
    out, _ = process.communicate("text", timeout=60)
    os.close(writer)
    said = b"".join(
        iter(lambda: os.read(reader, 65536), b"")
    )  # ends only if no copy of the pipe's end is left
    os.close(reader)
    assert process.returncode == 0 and out == "text!\n"
    seen = json.loads(said)
    assert seen.pop("group") == process.pid
    return seen


def test_a_forked_process_takes_over_what_an_exec_would_hand_on(started, tmp_path):
    forked, plain = look(started, tmp_path, RANK="3"), look(started, tmp_path, RANK="3", MINE="1")
    # MINE is a variable that an import may have read
    assert "not forked: MINE differ" in (tmp_path / "said").read_text()
    assert (forked.pop("loaded"), forked.pop("parent"), forked.pop("mine")) == (
        True,
        started.server.pid,
        None,
    )
    assert (plain.pop("loaded"), plain.pop("parent"), plain.pop("mine")) == (False, os.getpid(), "1")
    assert forked == plain and plain["umask"] == 0o027 and plain["usr1"] and plain["rank"] == "3"


@pytest.mark.parametrize(
    "code, expected",
    [
        ("sys.exit(5)", 5),
        ("raise ValueError", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
    ],
)
def test_the_launcher_ends_as_the_forked_process_does(started, code, expected):
    process = started.run(f"assert loaded; {code}", stderr=subprocess.DEVNULL)
    process.communicate(timeout=60)
    assert process.returncode == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_the_forked_process(started, number):
    process = started.run(
        "import os, time; print(os.getpid(), loaded, flush=True); time.sleep(600)", stderr=subprocess.DEVNULL
    )
    pid, loaded = process.stdout.readline().split()
    assert loaded == "True" and int(pid) != process.pid
    os.kill(process.pid, number)
    assert process.wait(60) in (-number, 1)
    assert wait_for(lambda: not alive(int(pid)))


def test_without_its_server_a_forked_process_lives_on_and_the_next_is_not_forked(started):
    process = started.run(
        "import os; print(os.getpid(), flush=True); sys.stdin.read()", stdin=subprocess.PIPE
    )
    pid = int(process.stdout.readline())
    started.server.kill()
    started.server.wait()
    assert alive(pid)
    process.communicate("", timeout=60)
    assert process.returncode == 1 and wait_for(lambda: not alive(pid))
    other = started.run("print(loaded)")
    assert other.communicate(timeout=60)[0] == "False\n" and other.returncode == 0


def test_the_server_ends_with_the_last_process_once_the_raylet_has_ended(started):
    process = started.run(
        "import os; print(os.getpid(), flush=True); sys.stdin.read()", stdin=subprocess.PIPE
    )
    process.stdout.readline()
    started.raylet.kill()
    started.raylet.wait()
    with pytest.raises(subprocess.TimeoutExpired):
        started.server.wait(0.5)
    process.communicate("", timeout=60)
    assert process.returncode == 0 and started.server.wait(60) == 0 and not started.folder.exists()


def test_what_random_numbers_come_from_is_drawn_anew(started):
    code = "import random, multiprocessing as m; print(random.random(), m.current_process().authkey.hex())"
    first, second = (started.run(code).communicate(timeout=60)[0].split() for _ in range(2))
    assert first[0] != second[0] and first[1] != second[1]


def test_other_commands_are_run_by_the_interpreter(started):
    done = subprocess.run(
        [started.script, "-c", LOADED + "print(loaded, sys.argv)", "x"], capture_output=True, text=True
    )
    assert done.stdout == "False ['-c', 'x']\n"


def test_a_server_that_cannot_fork_leaves_its_script_to_the_raylet(tmp_path):
    """A raylet's workers could not start at all without it."""
    (tmp_path / "leaves_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    (tmp_path / "folder").mkdir()
    os.environ["PYTHONPATH"], before = str(tmp_path), os.environ.get("PYTHONPATH")
    try:
        started = Started(tmp_path / "folder", "leaves_thread")
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    try:
        for _ in range(2):  # while it imports, and after it gave up
            process = started.run("print(loaded)")
            assert process.communicate(timeout=60)[0] == "False\n" and process.returncode == 0
            assert wait_for(lambda: "no worker is forked" in (tmp_path / "said").read_text())
        started.raylet.kill()
        started.raylet.wait()
        assert started.server.wait(60) == 0 and not started.folder.exists()
    finally:
        started.end()


def test_an_import_that_leaves_a_thread_forbids_forks(tmp_path):
    code = """
        import threading, time
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        from flashpatch.patches.cpu.warm import server
        server.PATIENCE = 0.1
        print(server.settle())
    """
    import textwrap

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("imports left threads: "), done.stderr


def test_a_folder_whose_scripts_cannot_run_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(session.os, "access", lambda path, mode: False)
    assert session.start({}) is None and "cannot be executed" in caplog.text
