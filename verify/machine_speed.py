"""Scale time-outs by how slow or busy this machine is.

A time-out in seconds is chosen on a quiet machine of two cores. On a slower or busier one the same work takes
longer, so a fixed time-out fails what is healthy. `factor` times a fixed workload, compiling Python source and a
small matrix product on one thread, and divides by what it takes on the reference machine; the larger of the two
ratios counts, and a machine with one core counts twice. The factor lies between 1 and 8.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

LEAST, MOST = 1.0, 8.0
REPEATS = 4  # the mean counts: the minimum would hide other processes
COMPILE_SECONDS = 0.030
"""Seconds that the reference machine takes to compile and execute `_SOURCE`, when quiet."""
PRODUCT_SECONDS = 0.030
"""Seconds that the reference machine takes for the matrix products, when quiet."""

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
_SIZE, _PRODUCTS = 192, 32

_factor: float | None = None


def factor() -> float:
    """By how much to scale a time-out here, from 1 to 8; measured at the first call in a process."""
    global _factor
    if _factor is None:
        _factor = measure()
    return _factor


def scaled(seconds: float) -> float:
    """A time-out of ``seconds`` on the reference machine, in seconds on this one."""
    return seconds * factor()


def measure(clock: Callable[[], float] = time.perf_counter, cores: int | None = None) -> float:
    """Time the workload now, some 0.3 s on the reference machine.

    Args:
        clock: seconds from any start.
        cores: CPU cores that this process may use; None asks the operating system.
    """
    ratios = [_seconds(_compile, clock) / COMPILE_SECONDS]
    product = _product()
    if product is not None:
        ratios.append(_seconds(product, clock) / PRODUCT_SECONDS)
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    return min(MOST, max(LEAST, max(ratios) * max(1.0, 2.0 / cores)))


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Mean seconds of the workload."""
    began = clock()
    for _ in range(REPEATS):
        work()
    return (clock() - began) / REPEATS


def _compile() -> None:
    exec(compile(_SOURCE, "<calibration>", "exec"), {})


def _product() -> Callable[[], object] | None:
    """The matrix products, on one thread as the probes' engines compute; None without NumPy."""
    try:
        import numpy
    except ImportError:
        return None
    matrix = numpy.random.default_rng(0).standard_normal((_SIZE, _SIZE), dtype=numpy.float32)
    return lambda: [numpy.einsum("ij,jk->ik", matrix, matrix) for _ in range(_PRODUCTS)]
