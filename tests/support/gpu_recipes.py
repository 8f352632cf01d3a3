"""Record what the scripts of ``examples/gpu`` would start: bash runs them on a python3 that only writes its arguments
down."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tree import TREE

GPU = TREE / "examples" / "gpu"
SCRIPTS = sorted(GPU.glob("*.sh"))
RECORDER = """#!/usr/bin/env bash
{ printf '%s\\0' "$@"; } > "$RECORDED.arguments"
{ printf '%s\\0' "FLASHPATCH=${FLASHPATCH-}" "FLASHPATCH_CONFIG=${FLASHPATCH_CONFIG-}"; } > "$RECORDED.variables"
"""


@dataclass(frozen=True)
class Recipe:
    """Hold what a script starts: verl's overrides, and FlashPatch's variables."""

    module: str
    overrides: tuple[str, ...]
    variables: dict[str, str]


def recorded(script: Path, folder: Path, *arguments: str, **variables: str) -> Recipe:
    """Run a script with ``python3`` replaced.

    ``script``: its path; ``folder``: home of the run; nothing is written anywhere else; ``arguments``: of the script;
    ``variables``: of its environment, beside PATH and HOME."""
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    (binaries / "python3").write_text(RECORDER)
    (binaries / "python3").chmod(0o755)
    env = {"PATH": f"{binaries}:{os.environ['PATH']}", "HOME": str(folder), **variables}
    env["RECORDED"] = str(folder / "recorded")
    command = ["bash", script, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    _, module, *overrides = _read(folder / "recorded.arguments")
    given = dict(text.partition("=")[::2] for text in _read(folder / "recorded.variables"))
    return Recipe(module, tuple(overrides), {name: value for name, value in given.items() if value})


def _read(file: Path) -> list[str]:
    return file.read_text().split("\0")[:-1]
