"""Measure the processor time of each test: `pytest --cpu-times`, or `--cpu-times=FILE` to keep a line per test.

A test's time is that of the test process and of all processes it starts, detached ones included. Times of wall
clocks say little where several runs share the cores. Not with `-n`: workers run tests at the same time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PR_SET_CHILD_SUBREAPER = 36
TICK = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times",
        metavar="FILE",
        nargs="?",
        const="",
        help="print processor seconds per test file; also write a line per test to FILE",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if config.getoption("--cpu-times") is not None:
        if config.getoption("--cpu-times").endswith(".py"):
            raise pytest.UsageError(
                "--cpu-times takes the file that follows it to write to; write --cpu-times=FILE"
            )
        if getattr(config.option, "numprocesses", None):
            raise pytest.UsageError("--cpu-times measures one test at a time; leave -n out")
        root = _stay_behind()
        config.pluginmanager.register(CpuTimes(root, config.getoption("--cpu-times")))


class CpuTimes:
    """Keep processor and wall seconds of each test of this session."""

    def __init__(self, root: int, file: str) -> None:
        self._root = root
        self._file = Path(file) if file else None
        self._tests: dict[str, tuple[float, float]] = {}
        self._collection = 0.0
        if self._file:
            self._file.write_text("")

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        result = yield
        self._collection = tree_seconds(self._root)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        cpu, wall = tree_seconds(self._root), time.monotonic()
        result = yield
        cpu = max(0.0, tree_seconds(self._root) - cpu)  # processes that end meanwhile may be missed
        wall = time.monotonic() - wall
        self._tests[item.nodeid] = cpu, wall
        if self._file:
            with self._file.open("a") as lines:
                lines.write(f"{cpu:.2f}\t{wall:.2f}\t{item.nodeid}\n")
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: dict[str, list[float]] = defaultdict(list)
        for name, (cpu, _) in self._tests.items():
            files[name.partition("::")[0]].append(cpu)
        total = tree_seconds(self._root)
        terminalreporter.section(
            f"processor time: {total:.0f} s, of which {self._collection:.0f} s collection"
        )
        for name, times in sorted(files.items(), key=lambda entry: -sum(entry[1])):
            terminalreporter.write_line(f"{sum(times):8.1f} s  {len(times):4d} tests  {name}")
        terminalreporter.write_line("")
        for name, (cpu, wall) in sorted(self._tests.items(), key=lambda entry: -entry[1][0])[:40]:
            terminalreporter.write_line(f"{cpu:8.1f} s  {wall:6.1f} s on the clock  {name}")


def tree_seconds(root: int) -> float:
    """Processor seconds of the descendants of process ``root``, both running and ended."""
    parents, ticks = {}, {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = [int(field) for field in fields[11:15]]  # utime stime cutime cstime
    below, new = set(), {root}
    while new:
        below |= new
        new = {pid for pid, parent in parents.items() if parent in new} - below
    return sum(sum(ticks[pid][2 if pid == root else 0 :]) for pid in below if pid in ticks) / TICK


def _stay_behind() -> int:
    """Go on in a child. This process adopts and reaps whatever the tests detach, so that its time counts."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    root, child = os.getpid(), os.fork()
    if child == 0:
        return root
    for number in (signal.SIGINT, signal.SIGTERM):  # the child ends by them, and this process after it
        signal.signal(number, lambda number, _: os.kill(child, number))
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
