"""What the tests of this folder share."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

from cpu_lab import environment, python, tail  # noqa: F401

MEET = """
import os, torch, torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=os.environ["MEET"], rank=rank, world_size=world)
"""
PART = """
dist.barrier()  # gloo aborts a rank whose peers are gone
dist.destroy_process_group()
"""


def ranks(code: str, folder: Path, world: int, timeout: float = 300, **extra: str) -> list[str]:
    """Run code on ``world`` gloo ranks; all must succeed. Returns what each printed."""
    meet = f"file://{folder}/meet-{time.monotonic_ns()}"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", MEET + textwrap.dedent(code) + PART],
            env=environment(folder, RANK=str(rank), WORLD_SIZE=str(world), MEET=meet, **extra),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + timeout
    try:
        said = [process.communicate(timeout=max(1.0, deadline - time.monotonic())) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for rank, (process, (out, err)) in enumerate(zip(running, said, strict=True)):
        assert process.returncode == 0, (
            f"rank {rank}: exit {process.returncode}\n{out[-3000:]}\n{err[-4000:]}"
        )
    return [out for out, _ in said]
