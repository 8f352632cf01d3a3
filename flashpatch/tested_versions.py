"""Look up the framework versions that a family's tests ran on, in ``patches/tested.toml``."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashpatch.record import Patch


def tested_versions(family: str, framework: str) -> tuple[str, ...]:
    """Return the versions on which patches of ``family`` for ``framework`` were tested; empty if none is known.

    Args:
        family: first part of a patch id.
        framework: second part of a patch id.

    Raises:
        ValueError: the file is not TOML of the form ``[family]`` with ``framework = ["version", ...]``.
    """
    return _read().get(family, {}).get(framework, ())


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
        return tested_versions(patch.family, patch.framework) if given is None else given

    def __set__(self, patch: Patch, versions: tuple[str, ...] | None) -> None:
        vars(patch)["tested"] = versions


@cache
def _read() -> dict[str, dict[str, tuple[str, ...]]]:
    import tomllib
    from importlib import import_module
    from pathlib import Path

    path = Path(import_module("flashpatch.patches").__path__[0]) / "tested.toml"
    with path.open("rb") as file:
        families = tomllib.load(file)
    return {family: _versions(family, table) for family, table in families.items()}


def _versions(family: str, table: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(table, dict):
        raise ValueError(f"tested.toml: {family!r} is not a table of frameworks")
    for framework, versions in table.items():
        if not isinstance(versions, list) or not all(isinstance(version, str) for version in versions):
            raise ValueError(f"tested.toml: {family}.{framework} is not a list of version strings")
    return {framework: tuple(versions) for framework, versions in table.items()}
