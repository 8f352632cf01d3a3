"""Measure sleep and wake of an engine: seconds, and memory in the first round and in the last.

After level 2 an engine gets its weights as trainers send them: between waking for weights and for the cache."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from cuda_lab import engine
from felting import models, updates

from card.table import BUCKETS, DENSE, GIB, ROUNDS


def measured(row: str, root: Path, ours: bool) -> dict[str, dict[str, float]]:
    """Return the median seconds of each part of a round, and by when the memory that is taken."""
    models.MODELS["sleep"], level = DENSE, int(row[-1])
    precision = "fp8" if row.startswith("fp8") else "bf16"
    llm = models.opened(root, "sleep", precision, enable_sleep_mode=True)
    runner, policy = engine.worker(llm).model_runner, models.policy("sleep", precision) if level == 2 else []
    load = updates._in_buckets if ours else updates._by_vllm
    parts: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, dict[str, float]] = {}

    def timed(part: str, work: Callable[[], Any]) -> None:
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        parts[part].append(time.perf_counter() - start)

    for number in range(ROUNDS):
        when = "last" if number else "first"
        memory[f"{when} awake"] = taken()
        timed("sleep", lambda: llm.sleep(level=level))
        memory[f"{when} asleep"] = taken()
        timed("wake weights", lambda: llm.wake_up(tags=["weights"]))
        if policy:
            timed("update", lambda: load(runner, policy, BUCKETS["512 MiB"]))
        timed("wake cache", lambda: llm.wake_up(tags=["kv_cache"]))
    return {part: {"s": statistics.median(some)} for part, some in parts.items()} | memory


def taken() -> dict[str, float]:
    """Return what is taken of the device, and of the host by this process."""
    free, total = torch.cuda.mem_get_info()
    host = psutil.Process().memory_info().rss
    return {"GiB of the device": (total - free) / GIB, "of the host": host / GIB}
