"""Time and peak extra memory of one call, in this process (Linux)."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET_PEAK = ("/proc/self/clear_refs", "5")  # see proc(5)


def measure(work: Callable[[], None]) -> dict[str, float]:
    """Run ``work``: ms (wall), cpu_ms (all threads), mb (highest resident memory above that before it)."""
    gc.collect()
    # What the C library keeps of freed memory would count as resident before the call, and hide its use.
    ctypes.CDLL(None).malloc_trim(0)
    Path(_RESET_PEAK[0]).write_text(_RESET_PEAK[1])
    before = _kilobytes("VmRSS")
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"ms": wall * 1e3, "cpu_ms": cpu * 1e3, "mb": (_kilobytes("VmHWM") - before) / 1024}


def _kilobytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0])
    raise SystemExit(f"{_STATUS} has no {field}")
