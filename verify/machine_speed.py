"""Scale time-outs by how slow or busy this machine is.

A time-out in seconds is chosen on a quiet machine of two cores. On a slower or busier one the same work takes
longer, so a fixed time-out fails what is healthy. `measure` times a fixed workload, compiling Python source, and divides
by what it takes on the reference machine; a machine with one core counts twice. The factor lies between 1 and 8.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

LEAST, MOST = 1.0, 8.0
REPEATS = 4  # the mean counts: the minimum would hide other processes
COMPILE_SECONDS = 0.030
"""Seconds that the reference machine takes to compile and execute `_SOURCE`, when quiet."""

_CLASS = '''
class C{0}:
    """Do something."""
    def f{0}(self, a, b=1, *c, **d):
        if a > {0}:
            return [x + b for x in range(a)]
        for k, v in d.items():
            self.x = (k, v, a * {0})
        return {{"a": a, "b": b}}
'''
_SOURCE = "\n".join(_CLASS.format(number) for number in range(120))


def measure(clock: Callable[[], float] = time.perf_counter, cores: int | None = None) -> float:
    """Return by how much to scale a time-out now, from 1 to 8; takes some 0.1 s on the reference machine.

    Args:
        clock: seconds from any start.
        cores: CPU cores that this process may use; None asks the operating system.
    """
    began = clock()
    for _ in range(REPEATS):
        exec(compile(_SOURCE, "<calibration>", "exec"), {})
    ratio = (clock() - began) / REPEATS / COMPILE_SECONDS
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    return min(MOST, max(LEAST, ratio * max(1.0, 2.0 / cores)))
