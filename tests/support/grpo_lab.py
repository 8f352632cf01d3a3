"""What the tests of this folder share."""

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
    arguments = ["-c", MEET + textwrap.dedent(code) + PART]
    places = [
        environment(folder, RANK=str(rank), WORLD_SIZE=str(world), MEET=meet, **extra)
        for rank in range(world)
    ]
    done = warm.run_together(
        warm.VERL, [(arguments, env) for env in places], cwd=folder, timeout=limit(timeout)
    )
    failed = [f"rank {rank}: {tail(one)}" for rank, one in enumerate(done) if one.returncode]
    assert not failed, "\n".join(failed)
    return [one.stdout for one in done]
