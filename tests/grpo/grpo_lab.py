"""What the tests of this folder share."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

OURS = ("FLASHPATCH", "VERL_", "RAY_", "VLLM_")

MEET = """
import os, torch, torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=os.environ["MEET"], rank=rank, world_size=world)
"""
PART = """
dist.barrier()  # gloo aborts a rank whose peers are gone
dist.destroy_process_group()
"""


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """This process's environment without anything that could help a scenario along, and with ``extra``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {
        **clean,
        "FLASHPATCH_LEDGER": str(folder / "ledger"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        **extra,
    }


def python(code: str, folder: Path, timeout: float = 300, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment(folder, **extra),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


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


def tail(done: subprocess.CompletedProcess[str]) -> str:
    """The end of what a process said, for a failed assertion."""
    return f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
