"""Read files from elsewhere: checked before they are read, and never executed.

Everything here raises `flashpatch.PatchError` and nothing else for a file that is not what it should be.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from flashpatch.errors import PatchError

PATCH = "fp8.profile"
MIB = 1 << 20

#: Limits in bytes. The scales of a 70B model are about 40 MiB; its tensor index about 100 KiB.
PROFILE_LIMIT = 512 * MIB
JSON_LIMIT = 64 * MIB
HEADER_LIMIT = 64 * MIB

_TENSOR = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,299}\Z")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}\Z")


def refuse(path: Path | str, problem: str, advice: str = "") -> PatchError:
    """Return the error for a file that cannot be used."""
    return PatchError(f"{path}: {problem}.", patch=PATCH, advice=advice or "Give another file.")


def size(path: Path, limit: int) -> int:
    """Return the size of a regular file in bytes, links followed.

    Raises:
        PatchError: it is not there, not a regular file, empty, or larger than ``limit`` bytes.
    """
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


def text(path: Path, limit: int = JSON_LIMIT) -> str:
    """Return the UTF-8 text of a file. Raises PatchError: as `size` does, or the bytes are not UTF-8."""
    size(path, limit)
    try:
        with open(path, "rb") as file:
            return file.read(limit + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(path, f"is not UTF-8 text ({error})") from error


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises PatchError: as `text` does, or it is not one."""
    return parsed_object(text(path), path)


def parsed_object(written: str, path: Path | str) -> dict[str, Any]:
    """Return ``written`` as a JSON object; ``path`` is for the message. Raises PatchError: it is not one."""
    try:
        found = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise refuse(path, f"is not JSON ({type(error).__name__}: {str(error)[:80]})") from error
    if not isinstance(found, dict):
        raise refuse(path, "is not a JSON object")
    return found


def tensor_name(name: Any, path: Path | str) -> str:
    """Return ``name`` if it can be the name of a tensor. Raises PatchError: it has separators, spaces or the
    like."""
    if not isinstance(name, str) or not _TENSOR.match(name) or ".." in name:
        raise refuse(path, f"names a tensor {str(name)[:60]!r}")
    return name


def file_name(name: Any, path: Path | str) -> str:
    """Return ``name`` if it is a plain file name. Raises PatchError: it leads elsewhere."""
    if not isinstance(name, str) or not _FILE.match(name) or ".." in name:
        raise refuse(path, f"points to the file {str(name)[:60]!r}, which is not a plain name beside it")
    return name


def safetensors_header(path: Path, limit: int) -> dict[str, Any]:
    """Return the header of a safetensors file, read without the data: tensor name to dtype, shape and offsets.

    Args:
        path: the file.
        limit: bytes the whole file may have.

    Raises:
        PatchError: as `size` does; the header's length is absurd; the header is not a JSON object.
    """
    total = size(path, limit)
    with open(path, "rb") as file:
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 9 or length < 2 or length > min(HEADER_LIMIT, total - 8):
            if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
                raise refuse(path, "is a pickle, not safetensors; it was not opened")
            raise refuse(path, "is not a safetensors file (its header cannot be that long)")
        file.seek(8)
        try:
            header = file.read(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise refuse(path, f"is not a safetensors file (its header is not UTF-8: {error})") from error
    return parsed_object(header, path)
