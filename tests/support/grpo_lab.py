"""What the tests of this folder share."""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
from pathlib import Path

import warm
from cpu_lab import environment, python, tail  # noqa: F401
from machine import limit

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
    logs = [tempfile.TemporaryFile() for _ in range(2 * world)]
    with open(os.devnull) as nothing:
        running = [
            warm.start(
                warm.VERL,
                ["-c", MEET + textwrap.dedent(code) + PART],
                env=environment(folder, RANK=str(rank), WORLD_SIZE=str(world), MEET=meet, **extra),
                cwd=folder,
                descriptors={0: nothing.fileno(), 1: out.fileno(), 2: err.fileno()},
            )
            for rank, (out, err) in enumerate(zip(logs[::2], logs[1::2], strict=True))
        ]
    deadline = time.monotonic() + limit(timeout)
    try:
        for process in running:
            process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        for process in running:
            process.kill()
            process.wait()
    said = [warm.text(log) for log in logs]
    failed = [
        f"rank {rank}: exit {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
        for rank, (process, out, err) in enumerate(zip(running, said[::2], said[1::2], strict=True))
        if process.returncode
    ]
    assert not failed, "\n".join(failed)
    return said[::2]
