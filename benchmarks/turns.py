"""Let engines in processes of their own take turns, and compare their times by ratios with intervals."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Engine:
    """Run this script's command line again with ``--engine NAME``, and talk to it in lines of JSON.

    Raises:
        SystemExit: the engine ended, instead of answering."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, *sys.argv, "--engine", name]
        pipe = subprocess.PIPE
        clean = {key: value for key, value in os.environ.items() if not key.startswith("FLASHPATCH")}
        self.name = name
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=clean | ENVIRONMENT)

    def ask(self, question: Any) -> dict[str, Any]:
        """Send a question; return the answer."""
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for the next line that is a JSON object; the first one says that the engine is open."""
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"the engine {self.name!r} ended: exit {self._process.wait()}")


def middle(values: list[float]) -> dict[str, float]:
    """Return the median as ``ratio``, and ``low`` and ``high``: the interval that holds the true median in 95 of 100 such
    runs, the range for few values."""
    values, count = sorted(values), len(values)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return {"ratio": statistics.median(values), "low": values[low], "high": values[high]}


def cpu() -> str:
    """Return the name of this CPU and those of its extensions that decide which kernels run."""
    told = dict(
        map(str.strip, line.split(":", 1))
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if ":" in line
    )
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    flags = set(told.get("flags", "").split())
    return f"{told.get('model name', 'CPU')} ({', '.join(name for name in known if name in flags)})"
