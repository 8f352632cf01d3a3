"""Scale the tests' time-outs to how slow and how busy this machine is."""

import functools
import os

FACTOR = "TEST_TIME_FACTOR"


def limit(seconds: float) -> float:
    """Return a time-out: ``seconds`` on a quiet, fast machine, and up to eight times as many elsewhere."""
    return seconds * factor()


@functools.cache
def factor() -> float:
    """Measure once per process how much longer things take here, from 1 to 8; $TEST_TIME_FACTOR overrides it."""
    if given := os.environ.get(FACTOR):
        return float(given)
    from flashpatch.verify.probes import jobs  # here, as processes free of FlashPatch import this file

    # What runs beside a test may come after the measurement: half as much again is allowed from the start.
    return min(1.5 * jobs.busyness(), jobs.MOST)
