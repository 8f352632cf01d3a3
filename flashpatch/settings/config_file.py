"""Read the TOML file: names to switch on, strictness, and one table of options per family.

.. code-block:: toml

    enable = ["fp8", "flowrl"]
    strict = true

    [fp8]
    exclude = ["reward-model"]
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashpatch import registry
from flashpatch.errors import PatchError
from flashpatch.settings import options
from flashpatch.suggest import nearest

DEFAULT_FILE = "flashpatch.toml"


@dataclass(frozen=True)
class Config:
    """Hold the checked content of a config file.

    Attributes:
        enable: names to switch on with ``FLASHPATCH=1`` or ``enable()``; None when the file does not say.
        strict: None when the file does not say.
        tables: family name to options.
    """

    enable: tuple[str, ...] | None = None
    strict: bool | None = None
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def load() -> Config:
    """Read the file named by ``FLASHPATCH_CONFIG``, else ``./flashpatch.toml`` if there is one, else nothing.

    Raises:
        PatchError: a named file is missing, not TOML, or has an unknown key or wrong value.
    """
    named = os.environ.get("FLASHPATCH_CONFIG", "")
    path = Path(named or DEFAULT_FILE)
    if not named and not path.is_file():
        return Config()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PatchError(
            f"cannot read config {path}: {error}.", advice="Correct the file or FLASHPATCH_CONFIG."
        ) from error
    return _checked(data, str(path))


def _checked(data: dict[str, Any], source: str) -> Config:
    enable = data.pop("enable", None)
    if enable is not None and (
        not isinstance(enable, list) or not all(isinstance(name, str) for name in enable)
    ):
        raise PatchError(f"'enable' in {source} is {enable!r}.", advice="Give a list of names.")
    strict = data.pop("strict", None)
    if not isinstance(strict, (bool, type(None))):
        raise PatchError(f"'strict' in {source} is {strict!r}.", advice="Give true or false.")
    for key, table in data.items():
        if not registry.is_family(key):
            known = ("enable", "strict", *registry.family_keys())
            raise PatchError(f"unknown key {key!r} in {source}.", advice=nearest(key, known))
        if not isinstance(table, dict):
            raise PatchError(f"{key!r} in {source} is {table!r}.", advice=f"Write a table: [{key}].")
    tables = {
        key: options.checked(registry.family(key), table, f"[{key}] of {source}")
        for key, table in data.items()
    }
    return Config(None if enable is None else tuple(enable), strict, tables)
