"""Scale the tests' time-outs to how slow and how busy this machine is."""

import functools
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

FACTOR = "TEST_TIME_FACTOR"


def limit(seconds: float) -> float:
    """Return a time-out: ``seconds`` on a quiet, fast machine, and up to eight times as many elsewhere."""
    return seconds * factor()


def run(command: list[Any], seconds: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command with this time-out and keep its output as text; ``more`` goes to `subprocess.run`."""
    return subprocess.run(command, capture_output=True, text=True, timeout=limit(seconds), **more)


def until(look: Callable[[], Any], seconds: float = 60) -> Any:
    """Return what ``look`` gives once it is true."""
    end = time.monotonic() + limit(seconds)
    while not (found := look()):
        assert time.monotonic() < end, f"nothing within {limit(seconds):.0f} s"
        time.sleep(0.02)
    return found


@functools.cache
def factor() -> float:
    """Measure once per process how much longer things take here, from 1 to 8; $TEST_TIME_FACTOR overrides it."""
    if given := os.environ.get(FACTOR):
        return float(given)
    from flashpatch.verify.probes import jobs  # here, as processes free of FlashPatch import this file

    # What runs beside a test may come after the measurement: half as much again is allowed from the start.
    return min(1.5 * jobs.busyness(), jobs.MOST)


def polled(one: Any, condition: Callable[[], object], seconds: float = 240.0) -> list[dict[str, Any]]:
    """Poll a coordinator until a condition holds; a poll that waits for its worker is found by the limit."""
    end, events = time.monotonic() + limit(seconds), []
    while not condition():
        assert time.monotonic() < end, (one.state, one.problem, one.figures, list(one._errors), events)
        events += one.poll()
        time.sleep(0.005)
    return events
