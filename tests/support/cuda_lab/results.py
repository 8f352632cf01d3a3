"""What a lab's process has found, a record per case, written as the case ends: a process that is killed leaves the others."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add(out: str | Path, name: str, result: Any) -> None:
    """Append what was found of a case."""
    with Path(out).open("ab") as file:
        file.write(pickle.dumps((name, result)))


def add_all(out: str | Path, found: Mapping[str, Any]) -> None:
    for name, result in found.items():
        add(out, name, result)


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
