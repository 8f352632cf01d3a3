"""Run functions of a probe in processes of their own, as a user's program would run; each leaves what it saw as a JSON file.

Their environment is clean, one time-out is for all, and nothing is left behind. The time-out is that of a quiet machine of two
cores; where processes wait for a core, `busyness` scales it."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.patches._shared.child import kill_group

FRESH = "fresh"
"""Name of the job that runs without FlashPatch."""
TOLD = "told"
"""File of lines for who waits."""
hear: Callable[[str], None] = print
"""What takes the lines that jobs tell; `flashpatch.verify.run` sets it."""
MOST = 8.0  # times as long as on a quiet machine
_TAIL = 900  # characters at the end of a log that are shown
_POLL = 0.1  # seconds
_LAST_ROW = 2.0  # seconds until every process has written its last row
#: Beginnings of variables that a surrounding job may have set and that would reach a probe's processes.
_FROM_A_JOB = ("DIST_INIT_", "LOCAL_RANK", "LOCAL_WORLD_", "MASTER_", "RANK", "TORCHELASTIC_", "WORLD_SIZE")
_EVERYWHERE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Command:
    """One process to start: its name in reports, what follows ``python -P``, and variables beside those inherited.

    One that is ``stock`` starts without FlashPatch's variables; one that ``stops_others`` has them killed if it fails."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    stock: bool = False
    stops_others: bool = True


@dataclass(frozen=True)
class Outcome:
    """Hold how the jobs of a probe ended: what each saw and why it failed, by name, and what went wrong in all of them."""

    seen: Mapping[str, dict[str, Any]]
    problems: Mapping[str, str]
    problem: str
    seconds: float

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return [self.seen[name] for name in sorted(self.seen) if name.startswith("rank-")]

    def checked(self) -> Outcome:
        """Return this. Raises RuntimeError with what went wrong, if something did."""
        if self.problem:
            raise RuntimeError(self.problem)
        return self


def job(
    function: str, workdir: Path, name: str = "job", environment: Mapping[str, str] | None = None
) -> Command:
    """Return the command that calls a function with the working directory and a dictionary for what it sees.

    ``function`` is ``MODULE:FUNCTION``, the module below `flashpatch.verify.probes`; it may be a coroutine. What it sees is
    written as ``NAME.json``. The job `FRESH` runs without FlashPatch, and may fail alone."""
    arguments = ["-c", f"from {__name__} import main; main()", function, str(workdir), name]
    return Command(name, arguments, environment or {}, stock=name == FRESH, stops_others=name != FRESH)


def ranks(
    function: str, workdir: Path, world: int = 2, environment: Mapping[str, str] | None = None
) -> list[Command]:
    """Return a `job` per rank of a torch.distributed job, named ``rank-NUMBER``; ranks meet in a file of the function."""
    meeting = workdir / f"{function.replace(':', '-')}.meet"
    meeting.unlink(missing_ok=True)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DIST_INIT_METHOD": f"file://{meeting}"}
    shared = {**(environment or {}), **meet, "WORLD_SIZE": str(world)}
    return [
        job(function, workdir, f"rank-{rank}", {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]


def run(commands: Sequence[Command], workdir: Path, timeout: float) -> Outcome:
    """Run commands side by side in a directory, which gets their logs, kill what is left, and read what they saw.

    All have ``timeout`` seconds together on a quiet machine of two cores."""
    began, running = time.monotonic(), dict[str, subprocess.Popen[bytes]]()
    with ExitStack() as stack:
        for command in commands:
            running[command.name] = _start(command, workdir)
            stack.callback(_kill, running[command.name])
        essential = [running[command.name] for command in commands if command.stops_others]
        reason = _wait(running, essential, workdir / TOLD, timeout)
        ended = {name: _status(process) for name, process in running.items()}
    seen, problems = {}, {}
    # Those that were killed here come last.
    for name, status in sorted(ended.items(), key=lambda one: one[1] is None):
        path = workdir / f"{name}.json"
        seen[name] = json.loads(path.read_text()) if path.exists() else {}
        how = reason if status is None else f"ended with status {status}"
        tail = (workdir / f"{name}.log").read_text(errors="replace").strip()[-_TAIL:]
        problems[name] = seen[name].get("failed") or (f"{name} {how}: ...{tail}" if status != 0 else "")
    own = dict.fromkeys(one["failed"] for one in seen.values() if "failed" in one)
    problem = " | ".join(own or filter(None, problems.values()))
    return Outcome(seen, problems, problem, time.monotonic() - began)


def busyness() -> float:
    """Return by how much to scale a time-out on this machine now, from 1 to 8: by how many processes share a core."""
    return min(MOST, max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))


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
    essential: Sequence[subprocess.Popen[bytes]],
    told: Path,
    timeout: float,
) -> str:
    """Wait until all have ended, an essential one has failed, or time is up, and hear what they tell; why the rest is killed."""
    began, limit, heard = time.monotonic(), timeout, 0
    while True:
        going = None in [_status(process) for process in running.values()]
        lines = told.read_text().splitlines() if told.exists() else []
        for line in lines[heard:]:
            hear(line)
        heard = len(lines)
        if not going:
            return ""
        if failed := [name for name, one in running.items() if one in essential and _status(one)]:
            return f"was killed, as {failed[0]} had failed"
        limit = max(limit, timeout * busyness())
        if time.monotonic() - began >= limit:
            return f"did not end within {limit:.0f} s"
        time.sleep(_POLL)


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


def engine_here(kind: str = "") -> str:
    """Return the name of the installed engine, of this kind if one is named: vllm if both are, empty if neither is."""
    return next((name for name in ([kind] if kind else ["vllm", "sglang"]) if find_spec(name)), "")


def engine() -> Any:
    """Return the module of the installed engine's standard job: `vllm_engine` or `sglang_engine`."""
    if not (name := engine_here()):
        raise RuntimeError("neither vLLM nor SGLang is installed here")
    return import_module(f"{__package__}.{name}_engine")


def wait_for(path: Path) -> str:
    """Return the text of a file that another job writes, which on a busy machine may take long; the time-out is that of both."""
    while not path.exists():
        time.sleep(0.1)
    return path.read_text()


def tell(workdir: Path, line: str) -> None:
    """Tell who waits for the probe what a job has done."""
    with (workdir / TOLD).open("a") as told:
        told.write(f"{line}\n")


@cache
def given() -> dict[str, Any]:
    """Return the settings of ``settings.toml``."""
    return tomllib.loads(Path(__file__).with_name("settings.toml").read_text())


def write(path: Path, value: Any) -> None:
    """Write a JSON file atomically: another job may wait for it."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(value))
    draft.replace(path)


def main() -> None:
    """Run one job: ``python -c ... MODULE:FUNCTION WORKDIR NAME``."""
    (module, _, function), workdir, name = sys.argv[1].partition(":"), Path(sys.argv[2]), sys.argv[3]
    seen: dict[str, Any] = {}
    try:
        found = getattr(import_module(f"{__package__}.{module}"), function)(workdir, seen)
        if inspect.iscoroutine(found):
            asyncio.run(found)
        patched = sys.modules.get("flashpatch.engine")
        if name == FRESH and patched is not None and patched.manager.selection.choices:
            raise RuntimeError("this engine is not independent: FlashPatch is in its process")
    except BaseException as error:
        traceback.print_exc()
        seen["failed"] = f"{type(error).__name__}: {error}"
    write(workdir / f"{name}.json", seen)
    time.sleep(_LAST_ROW)
    ledger.ending()  # of this process, which has done its part
    os._exit("failed" in seen)  # an engine's shutdown takes seconds; what is left of it is killed
