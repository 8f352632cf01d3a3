"""Refuse a file that cannot be used."""

from __future__ import annotations

from pathlib import Path

from flashpatch.errors import PatchError

PATCH = "fp8.profile"


def refuse(path: Path | str, problem: str, advice: str = "Give another file.") -> PatchError:
    """Return the error for a file that cannot be used."""
    return PatchError(f"{path}: {problem}.", patch=PATCH, advice=advice)
