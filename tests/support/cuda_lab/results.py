"""What a lab's process has found, a record per case, written as the case ends: a process that is killed leaves the others."""

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


def add(out: str | Path, name: str, result: Any) -> None:
    """Append what was found of a case."""
    with Path(out).open("ab") as file:
        file.write(pickle.dumps((name, result)))


def attempt(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a case finds, or its error, which is printed too."""
    try:
        return case()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def leave() -> NoReturn:
    """End the process without its destructors: those of CUDA libraries find no device."""
    sys.stdout.flush()
    os._exit(0)


def read(out: str | Path) -> dict[str, Any]:
    """Return by case what is there; a record that is being written counts as not there."""
    found: dict[str, Any] = {}
    if not Path(out).exists():
        return found
    with Path(out).open("rb") as file:
        while True:
            try:
                name, result = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return found
            found[name] = result
