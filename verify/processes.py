"""Run the processes of a probe: a clean environment, one time-out for all, and nothing left behind.

A probe says what to run, as `Command`, and judges the files that its processes wrote. The time-out is that of a quiet machine
of two cores; where processes wait for a core, `busyness` scales it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from flashpatch.patches._shared.child import kill_group

TAIL = 900  # characters at the end of a log that are shown
_POLL = 0.1  # seconds

MOST = 8.0  # times as long as on a quiet machine

#: Beginnings of variables that a surrounding job may have set and that would reach a probe's processes.
_FROM_A_JOB = ("DIST_INIT_", "LOCAL_RANK", "LOCAL_WORLD_", "MASTER_", "RANK", "TORCHELASTIC_", "WORLD_SIZE")
_EVERYWHERE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Command:
    """One process to start: its name in reports, what follows ``python -P``, and variables beside those inherited.

    One that is ``stock`` starts without FlashPatch's variables; one that ``stops_others`` has them killed if it fails.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    stock: bool = False
    stops_others: bool = True


@dataclass(frozen=True)
class Ending:
    """How one process ended: with a status, negative for a signal, or None if it was killed here for a ``reason``."""

    name: str
    status: int | None
    reason: str
    tail: str

    @property
    def problem(self) -> str:
        """What went wrong, with the end of the log; empty after exit status 0."""
        if self.status == 0:
            return ""
        how = self.reason if self.status is None else f"ended with status {self.status}"
        return f"{self.name} {how}: ...{self.tail}"


def rank_environments(workdir: Path, world: int) -> list[dict[str, str]]:
    """Variables of each rank of a torch.distributed job that meets in ``workdir``."""
    meeting = workdir / "meet"
    meeting.unlink(missing_ok=True)
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "DIST_INIT_METHOD": f"file://{meeting}",
    }
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(world)]


def problems(endings: Mapping[str, Ending]) -> str:
    """What went wrong in all processes, those that failed by themselves first; empty if all ended well."""
    bad = [ending for ending in endings.values() if ending.problem]
    return " | ".join(ending.problem for ending in sorted(bad, key=lambda ending: ending.status is None))


def busyness() -> float:
    """Return by how much to scale a time-out on this machine now, from 1 to 8: by how many processes share a core."""
    return min(MOST, max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))


def run(
    commands: Sequence[Command], workdir: Path, timeout: float, meanwhile: Callable[[], None] = lambda: None
) -> dict[str, Ending]:
    """Run commands side by side in a directory, which gets their logs, and kill what is left; return how each ended.

    All have ``timeout`` seconds together on a quiet machine of two cores; ``meanwhile`` is called again and again.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for command in commands:
            running[command.name] = _start(command, workdir)
            stack.callback(_kill, running[command.name])
        essential = [command.name for command in commands if command.stops_others]
        reason = _wait(running, essential, timeout, meanwhile)
        statuses = {name: _status(process) for name, process in running.items()}
    logs = {name: (workdir / f"{name}.log").read_text(errors="replace").strip() for name in statuses}
    return {name: Ending(name, status, reason, logs[name][-TAIL:]) for name, status in statuses.items()}


def _start(command: Command, workdir: Path) -> subprocess.Popen[bytes]:
    with (workdir / f"{command.name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", *command.arguments],
            env=_environment(command),
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _environment(command: Command) -> dict[str, str]:
    without = (*_FROM_A_JOB, "VLLM_CPU_KVCACHE_SPACE", *["FLASHPATCH"] * command.stock)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    return {**kept, **_EVERYWHERE, **command.environment}


def _wait(
    running: Mapping[str, subprocess.Popen[bytes]],
    essential: Collection[str],
    timeout: float,
    meanwhile: Callable[[], None],
) -> str:
    """Wait until all have ended, an essential one has failed, or time is up; why the rest is killed."""
    began, limit = time.monotonic(), timeout
    while None in [_status(process) for process in running.values()]:
        failed = [name for name in essential if _status(running[name])]
        if failed:
            return f"was killed, as {failed[0]} had failed"
        limit = max(limit, timeout * busyness())
        if time.monotonic() - began >= limit:
            return f"did not end within {limit:.0f} s"
        meanwhile()
        time.sleep(_POLL)
    return ""


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status, None while it runs. What an ended one left behind is killed once, as soon as the end is
    seen: later its number may be another process's."""
    if process.returncode is None and process.poll() is not None:
        kill_group(process)
    return process.returncode


def _kill(process: subprocess.Popen[bytes]) -> None:
    if _status(process) is None:
        kill_group(process)
        process.wait()
