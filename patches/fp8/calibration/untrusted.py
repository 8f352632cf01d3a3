"""Read files from elsewhere: checked before they are read, and never executed.

Everything here raises `flashpatch.PatchError` and nothing else for a file that is not what it should be."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashpatch.errors import PatchError

PATCH = "fp8.profile"
MIB = 1 << 20

#: Limits in bytes. The scales of a 70B model are about 40 MiB; its tensor index about 100 KiB.
PROFILE_LIMIT = 512 * MIB
JSON_LIMIT = 64 * MIB

_TENSOR = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,299}\Z")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}\Z")


def refuse(path: Path | str, problem: str, advice: str = "") -> PatchError:
    """Return the error for a file that cannot be used."""
    return PatchError(f"{path}: {problem}.", patch=PATCH, advice=advice or "Give another file.")


def size(path: Path, limit: int) -> int:
    """Return the size of a regular file in bytes, links followed. Raises PatchError if it is not there, not a regular
    file, empty, or larger than ``limit`` bytes."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise refuse(path, f"cannot be read ({error})") from error
    if not stat.S_ISREG(found.st_mode):
        raise refuse(path, "is not a regular file")
    if found.st_size == 0:
        raise refuse(path, "is empty")
    if found.st_size > limit:
        raise refuse(
            path, f"is {found.st_size / MIB:.0f} MiB, more than the {limit / MIB:.0f} MiB such a file may be"
        )
    return found.st_size


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises PatchError: as `size` does, or it is not one in UTF-8."""
    size(path, JSON_LIMIT)
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise refuse(path, f"is not JSON ({type(error).__name__}: {str(error)[:80]})") from error
    if not isinstance(found, dict):
        raise refuse(path, "is not a JSON object")
    return found


def tensor_name(name: Any, path: Path | str) -> str:
    """Return ``name`` if it can be the name of a tensor. Raises PatchError if it has separators, spaces or the like."""
    if not isinstance(name, str) or not _TENSOR.match(name) or ".." in name:
        raise refuse(path, f"names a tensor {str(name)[:60]!r}")
    return name


def file_name(name: Any, path: Path | str) -> str:
    """Return ``name`` if it is a plain file name. Raises PatchError: it leads elsewhere."""
    if not isinstance(name, str) or not _FILE.match(name) or ".." in name:
        raise refuse(path, f"points to the file {str(name)[:60]!r}, which is not a plain name beside it")
    return name


@contextmanager
def safetensors(path: Path, limit: int) -> Iterator[Any]:
    """Yield the open file of `safetensors.safe_open`, of at most ``limit`` bytes, which has checked the header. Raises
    PatchError as `size` does, and if it is not safetensors, or a tensor in it cannot be read."""
    from safetensors import SafetensorError, safe_open

    size(path, limit)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise refuse(path, f"cannot be read as safetensors ({error}); a pickle is never opened") from error
