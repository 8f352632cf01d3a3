"""Measure sleep and wake of an engine of 7B shapes: seconds, and memory before the first round and after the last.

    python -m cuda_lab.sleeps fresh|update CHECKPOINTS OUT NAME_LEVEL

After level 2 an engine gets its weights as trainers send them: between waking for weights and for the cache."""

import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import torch
from felting import models, updates

from cuda_lab import engine, results
from cuda_lab.sizes import GIB, HERE


def main(mode: str, root: str, out: str, name: str) -> None:
    level = int(name[-1])
    results.add(out, name, results.attempt(lambda: measured(Path(root), mode == "update", name[:-2], level)))
    results.leave()


def measured(root: Path, ours: bool, name: str, level: int) -> dict[str, Any]:
    """Say the median seconds of each part of a round, and the memory of device and host by when."""
    models.MODELS["sleep"] = HERE.dense
    precision = "fp8" if name == "fp8" else "bf16"
    llm = models.opened(root, "sleep", precision, enable_sleep_mode=True)
    runner, policy = engine.worker(llm).model_runner, models.policy("sleep", precision) if level == 2 else []
    load = updates._in_buckets if ours else updates._by_vllm
    parts: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, tuple[int, int]] = {}

    def timed(part: str, work: Any, *arguments: Any, **more: Any) -> None:
        start = time.perf_counter()
        work(*arguments, **more)
        torch.cuda.synchronize()
        parts[part].append(time.perf_counter() - start)

    for number in range(HERE.rounds):
        memory["last awake"] = taken()
        timed("sleep", llm.sleep, level=level)
        memory["last asleep"] = taken()
        timed("wake weights", llm.wake_up, tags=["weights"])
        if policy:
            timed("update", load, runner, policy, next(iter(HERE.buckets.values())))
        timed("wake cache", llm.wake_up, tags=["kv_cache"])
        if not number:
            memory |= {"first awake": memory["last awake"], "first asleep": memory["last asleep"]}
    seconds = (f"{part} {statistics.median(some):.3f} s" for part, some in parts.items())
    held = (f"{when} {device / GIB:.2f}, {host / GIB:.2f}" for when, (device, host) in memory.items())
    return {"said": f"{', '.join(seconds)}; GiB of device and host: {'; '.join(held)}"}


def taken() -> tuple[int, int]:
    """Return the bytes that are taken of the device, and of the host by this process."""
    free, total = torch.cuda.mem_get_info()
    return total - free, psutil.Process().memory_info().rss


if __name__ == "__main__":
    main(*sys.argv[1:])
