"""Run a Python beside this one that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile


def alone(
    arguments: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python in a process group of its own, for at most ``timeout`` seconds, and kill what it leaves behind.

    What it prints goes to files: of a pipe, a process that it left would hold the other end."""
    with TemporaryFile() as out, TemporaryFile() as err:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        finally:
            kill_group(process)
            process.wait()
        texts = [file.read().decode(errors="replace") for file in (out, err) if not file.seek(0)]
        return subprocess.CompletedProcess(command, process.returncode, *texts)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what there is of the process and of its children, which share its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing was left
