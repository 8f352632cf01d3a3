"""Scale the tests' time-outs to how slow and how busy this machine is."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time

FACTOR = "TEST_TIME_FACTOR"
#: Wall seconds of `_WORK` in a new interpreter, on a quiet core of the machines that the time-outs were chosen on.
REFERENCE = 0.15
_WORK = "import argparse, asyncio, json, subprocess, unittest\nfor _ in range(20): sum(range(100_000))"


def limit(seconds: float) -> float:
    """Return a time-out: ``seconds`` on a quiet, fast machine, and up to eight times as many elsewhere."""
    return seconds * factor()


@functools.cache
def factor() -> float:
    """Measure once per process how much longer things take here, from 1 to 8; $TEST_TIME_FACTOR overrides it."""
    if given := os.environ.get(FACTOR):
        return float(given)
    speed = min(_seconds() for _ in range(3)) / REFERENCE
    busy = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    # What runs beside a test may come after the measurement: half as much again is allowed from the start.
    return min(max(1.5 * max(speed, busy), 1.0), 8.0)


def _seconds() -> float:
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", _WORK], check=True)
    return time.monotonic() - start
