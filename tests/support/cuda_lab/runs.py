"""Run the labs of this package in processes of their own, on the fake device or a GPU; read what they wrote down."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import warm
from fake_cuda.variables import variables
from machine import limit

from cuda_lab import results

ENVIRONMENT = Path(sys.prefix)
# Becomes a command, and ends its group once nobody holds the pipe any more.
BOUND = 'exec 3<&0; (cat <&3; kill -9 0) >/dev/null & exec "$@" 3<&- </dev/null'


def is_built() -> bool:
    """Whether the fake device was built for this interpreter's environment."""
    return (ENVIRONMENT / "fake_cuda" / "fake_cuda_redirect.so").exists()


def environment(capability: int, **more: str) -> dict[str, str]:
    """Return variables for a process on the fake device of this capability, or on the GPU if it is 0."""
    more = {"VLLM_LOGGING_LEVEL": "ERROR", **more}
    if capability:
        return variables(ENVIRONMENT, capability, **more)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
    if find_spec("flashinfer") is None:  # without it vLLM 0.24 samples only if told to
        kept["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return {**kept, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", **more}


def run(
    folder: Path,
    what: str,
    mode: str,
    capability: int,
    names: Sequence[str],
    imported: Sequence[str] = (),
    **more: str,
) -> dict[str, dict[str, Any]]:
    """Return the result of each case.

    Args:
        folder: for checkpoints, which later runs share, and for what this run writes.
        what: `storage`, `engine`, `drafts`, `captured` or `jobs`, the module of this package to run; or `card`, of `benchmarks`.
        mode: `fresh`, or `update`: then FlashPatch is on, unless `more` says FLASHPATCH="0".
        capability: ten times the fake device's compute capability; 0: the GPU.
        names: of `cuda_lab.cases.CASES`; for engines with their steps; of drafts the arms.
        imported: modules that the process finds imported, as a fork of one that has done it; none: a new interpreter.
        more: further variables; `ATOMIC` is the option of FlashPatch."""
    out, arguments, env = _prepared(folder, what, mode, capability, names, more)
    timeout = limit(240 + 30 * len(names))
    if imported:
        done = warm.run(imported, arguments, env=env, cwd=folder, timeout=timeout)
    else:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    found = results.read(out)
    if not found or done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return found


def stream(
    folder: Path, what: str, mode: str, capability: int, names: Sequence[str], seconds: float, **more: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield case and result as each ends; the arguments are `run`'s.

    If the process ends early, another goes on with the rest; one that ends without a single result is its first case's error.

    ``seconds``: after which the process is killed; what it has not ended by then is not yielded."""
    pending, end = list(names), time.monotonic() + seconds
    while pending and time.monotonic() < end:
        out, arguments, env = _prepared(folder, what, mode, capability, pending, more)
        log = out.with_name("log")
        process = begin(arguments, env, log)
        try:
            ended, count = False, len(pending)
            while not ended and time.monotonic() < end:
                ended = process.poll() is not None  # before the reading, so that nothing is missed
                for name, result in results.read(out).items():
                    if name in pending:
                        pending.remove(name)
                        yield name, result
                time.sleep(0.2)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if ended and len(pending) == count:
            said = log.read_text(errors="replace").strip().splitlines()[-3:]
            yield pending.pop(0), {"error": f"its process ended with {process.returncode}: {' '.join(said)}"}


def begin(arguments: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start an interpreter in a group of processes that ends with this process, were it killed: else it would keep a GPU's memory."""
    command = ["sh", "-c", BOUND, "sh", sys.executable, *arguments]
    with log.open("w") as out:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=out, stderr=out, process_group=0
        )


def _prepared(
    folder: Path, what: str, mode: str, capability: int, names: Sequence[str], more: Mapping[str, str]
) -> tuple[Path, list[str], dict[str, str]]:
    """Return the file for results, the interpreter's arguments, and its environment."""
    patches = {"FLASHPATCH_LEDGER": str(folder / "ledger")}
    if mode == "update":
        options = folder / f"{more.get('ATOMIC', 'layer')}.toml"
        options.write_text(f'[fp8]\natomic = "{options.stem}"\n')
        patches |= {"FLASHPATCH": "bf16", "FLASHPATCH_CONFIG": str(options)}
    out = Path(tempfile.mkdtemp(dir=folder), "results")
    arguments = ["-m", what if what == "card" else f"cuda_lab.{what}"]
    arguments += [mode, str(folder / "checkpoints"), str(out), *names]
    return out, arguments, environment(capability, **{**patches, **more})
