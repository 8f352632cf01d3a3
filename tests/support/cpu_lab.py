"""What the tests of this folder share."""

import os
import subprocess
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import warm
from machine import limit

OURS = ("FLASHPATCH", "VERL_", "RAY_", "VLLM_")

#: Settings of Ray for a busy machine. Without the first two it starts workers that nobody asked for, each of which imports
#: FlashPatch and Ray; without the last, every worker stands behind all else that runs there.
BUSY = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
}


def environment(folder: Path, config: str = "", **extra: str) -> dict[str, str]:
    """This process's environment without anything that could help a scenario along, and with ``extra``.

    ``config`` is what a flashpatch.toml in the folder is to say."""
    if config:
        (folder / "flashpatch.toml").write_text(config)
        extra["FLASHPATCH_CONFIG"] = str(folder / "flashpatch.toml")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {
        **clean,
        "FLASHPATCH_LEDGER": str(folder / "ledger"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        **BUSY,
        **extra,
    }


def python(
    code: str,
    folder: Path,
    timeout: float = 600,
    *,
    imported: Sequence[str] = warm.VERL,
    arguments: Sequence[str] = (),
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, forked from one that has ``imported`` what verl imports, but not verl."""
    command, env = ["-c", textwrap.dedent(code), *arguments], environment(folder, **extra)
    return warm.run(imported, command, env=env, cwd=folder, timeout=limit(timeout))


def checked(code: str, folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """As `python`; it must succeed."""
    done = python(code, folder, **more)
    assert done.returncode == 0, tail(done)
    return done


def tail(done: subprocess.CompletedProcess[str]) -> str:
    """The end of what a process said, for a failed assertion."""
    return f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
