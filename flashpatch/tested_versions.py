"""Look up the framework versions that a family's tests ran on, in ``patches/tested.toml``."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashpatch.record import Patch


class TestedVersions:
    """The field ``tested`` of a `Patch`: what its record gives, else the family's versions from the file.

    The file is read when a record without versions of its own is first asked for them. A record that gives an empty
    tuple was tested on none, whatever its family was.
    """

    __test__ = False  # for pytest: not a class of tests

    def __get__(self, patch: Patch | None, owner: type | None = None) -> tuple[str, ...] | None:
        if patch is None:  # asked by dataclass for the default
            return None
        given = vars(patch)["tested"]
        return _read().get(patch.family, {}).get(patch.framework, ()) if given is None else given

    def __set__(self, patch: Patch, versions: tuple[str, ...] | None) -> None:
        vars(patch)["tested"] = versions


@cache
def _read() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the versions by family and framework."""
    import tomllib
    from importlib import import_module
    from pathlib import Path

    path = Path(import_module("flashpatch.patches").__path__[0]) / "tested.toml"
    with path.open("rb") as file:
        families = tomllib.load(file)
    return {
        family: {framework: tuple(versions) for framework, versions in table.items()}
        for family, table in families.items()
    }
