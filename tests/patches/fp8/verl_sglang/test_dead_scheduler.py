"""A server whose scheduler died and whose main thread never runs a signal's handler, as in a Ray actor."""

import sys
import time
from pathlib import Path

import machine
import pytest
from cpu_lab import environment
from machine import limit

pytestmark = pytest.mark.sglang

SERVER = """
import multiprocessing, signal, sys, time
import flashpatch
patched = sys.argv[1] == "patched"
from sglang.srt.utils.watchdog import SubprocessWatchdog
if patched:
    from flashpatch.patches.fp8.verl_sglang import http_server
    http_server.GRACE = 1.0
    original = SubprocessWatchdog._check_processes
    SubprocessWatchdog._check_processes = lambda self: http_server.check_processes(original, self)
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
scheduler, other = (multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)) for _ in range(2))
scheduler.start(); other.start()
SubprocessWatchdog([scheduler], interval=0.1).start()
print(other.pid, flush=True)
scheduler.kill()
time.sleep(float(sys.argv[2]))
other.kill()
other.join()
print("still there", flush=True)
"""


@pytest.mark.parametrize("which", [pytest.param("stock", marks=pytest.mark.full), "patched"])
def test_a_server_that_ignores_the_watchdogs_signal_is_ended(which: str, tmp_path: Path) -> None:
    # Stock: seconds after which it is shown to live on. Patched: the watchdog ends it long before.
    seconds = 8.0 if which == "stock" else limit(60)
    env = environment(tmp_path, SGLANG_USE_CPU_ENGINE="1")
    done = machine.run([sys.executable, "-c", SERVER, which, str(seconds)], 120, env=env, cwd=tmp_path)
    assert ("still there" in done.stdout) == (which == "stock"), done.stderr[-2000:]
    assert done.returncode == (0 if which == "stock" else -9)
    other, deadline = int(done.stdout.split()[0]), time.monotonic() + limit(60)
    while _runs(other) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(other)


def _runs(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
