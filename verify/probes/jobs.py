"""Run functions of a probe in processes of their own, as a user's program would run; each leaves what it saw as a JSON file."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashpatch.verify import processes
from flashpatch.verify.processes import Command

FRESH = "fresh"
"""Name of the job that runs without FlashPatch."""
TOLD = "told"
"""File of lines for who waits."""
hear: Callable[[str], None] = print
"""What takes the lines that jobs tell; `flashpatch.verify.run` sets it."""
_LAST_ROW = 2.0  # seconds until every process has written its last row


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


def job(
    function: str, workdir: Path, name: str = "job", environment: Mapping[str, str] | None = None
) -> Command:
    """Return the command that calls a function with the working directory and a dictionary for what it sees.

    ``function`` is ``MODULE:FUNCTION``, the module below `flashpatch.verify.probes`; it may be a coroutine. What it sees is
    written as ``NAME.json``. The job `FRESH` runs without FlashPatch, and may fail alone.
    """
    arguments = ["-c", f"from {__name__} import main; main()", function, str(workdir), name]
    return Command(name, arguments, environment or {}, stock=name == FRESH, stops_others=name != FRESH)


def ranks(
    function: str, workdir: Path, world: int = 2, environment: Mapping[str, str] | None = None
) -> list[Command]:
    """Return a `job` per rank of a torch.distributed job, named ``rank-NUMBER``; ranks meet in a folder of the function."""
    meeting = workdir / function.replace(":", "-")
    meeting.mkdir()
    variables = processes.rank_environments(meeting, world)
    return [
        job(function, workdir, f"rank-{rank}", {**(environment or {}), **one})
        for rank, one in enumerate(variables)
    ]


def run(commands: Sequence[Command], workdir: Path, timeout: float) -> Outcome:
    """Run jobs side by side, with one time-out for all, and read what they saw."""
    began, heard = time.monotonic(), 0

    def relay() -> None:
        nonlocal heard
        lines = (workdir / TOLD).read_text().splitlines() if (workdir / TOLD).exists() else []
        for line in lines[heard:]:
            hear(line)
        heard = len(lines)

    endings = processes.run(commands, workdir, timeout, relay)
    relay()
    seen, problems = {}, {}
    for name, ending in endings.items():
        path = workdir / f"{name}.json"
        seen[name] = json.loads(path.read_text()) if path.exists() else {}
        problems[name] = seen[name].get("failed") or ending.problem
    own = " | ".join(dict.fromkeys(one["failed"] for one in seen.values() if "failed" in one))
    return Outcome(seen, problems, own or processes.problems(endings), time.monotonic() - began)


def engine_here() -> str:
    """Return the name of the installed engine: vllm if both are, empty if neither is."""
    return next((name for name in ("vllm", "sglang") if find_spec(name) is not None), "")


def engine() -> Any:
    """Return the module of the installed engine's standard job: `vllm_engine` or `sglang_engine`."""
    return import_module(f"{__package__}.{engine_here()}_engine")


def wait_for(path: Path) -> str:
    """Return the text of a file that another job writes, which on a busy machine may take long; the time-out is that of both."""
    while not path.exists():
        time.sleep(0.1)
    return path.read_text()


def tell(workdir: Path, line: str) -> None:
    """Tell who waits for the probe what a job has done."""
    with (workdir / TOLD).open("a") as told:
        told.write(f"{line}\n")


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
    os._exit("failed" in seen)  # an engine's shutdown takes seconds; what is left of it is killed
