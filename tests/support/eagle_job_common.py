"""Share what the jobs of `eagle_jobs` need: prompts, a fixed policy, refusals, and the end of a job."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from pathlib import Path
from typing import Any


class Cycle:
    """Choose another number of tokens at every step, 0 among them."""

    def __init__(self, numbers: list[int]) -> None:
        from flashpatch.patches.eagle.bandit.arm import Arm

        self.arms = itertools.cycle([Arm(k, 1, k + 1) if k else Arm.DISABLE for k in numbers])
        self.updates: list[tuple[int, str, float]] = []
        self.refreshed = 0

    def select(self, batch_size: int) -> Any:
        return next(self.arms)

    def update(self, batch_size: int, arm: Any, tokens: float, seconds: float) -> None:
        self.updates.append((batch_size, str(arm), tokens))

    def metrics(self) -> dict[str, float]:
        return {}

    def refresh(self) -> None:
        self.refreshed += 1

    def state(self) -> dict[str, Any]:
        return {}


def prompts() -> list[list[int]]:
    noise = random.Random(3)
    return [[noise.randrange(3, 32) for _ in range(length)] for length in (5, 17, 33, 60, 3, 90, 12)]


def refusal(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def settle(queue: Path, counts: dict[str, Any]) -> None:
    import time

    from flashpatch.patches.eagle.capture.sample_queue import SampleReader

    deadline = time.monotonic() + 200  # reached only where samples were lost
    while len(SampleReader(queue)) < counts["requests"] and time.monotonic() < deadline:
        time.sleep(0.05)


def leave(at: Path, seen: dict[str, Any]) -> None:
    import psutil

    (at / "seen.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    for child in psutil.Process().children(recursive=True):  # else they keep our output open
        child.kill()
    os._exit(0)  # vLLM's shutdown takes seconds
