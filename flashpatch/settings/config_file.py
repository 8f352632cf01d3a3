"""Read the TOML file: names to switch on, strictness, and one table of options per family (`docs/reference/names-and-options.md`)."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from flashpatch import registry
from flashpatch.errors import PatchError, nearest
from flashpatch.settings import options
from flashpatch.settings.options import CONFIG, Config


def load() -> Config:
    """Read the file for `flashpatch.settings.selections.config`."""
    path = Path(os.environ.get("FLASHPATCH_CONFIG") or CONFIG)
    try:
        text = path.read_text(encoding="utf-8-sig")
        data = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        advice = "Correct the file or FLASHPATCH_CONFIG."
        if place := re.search(r"\(at line (\d+), ", str(error)):
            line = text.splitlines()[int(place[1]) - 1].strip()
            advice = f"The line is {line!r}: a value is true, false, a number, a list, or text in quotes."
        raise PatchError(f"cannot read config {path}: {error}.", advice=advice) from error
    enable = data.pop("enable", None)
    if enable is not None and (
        not isinstance(enable, list) or not all(isinstance(name, str) for name in enable)
    ):
        raise PatchError(f"'enable' in {path} is {enable!r}.", advice="Give a list of names.")
    strict = data.pop("strict", None)
    if not isinstance(strict, (bool, type(None))):
        raise PatchError(f"'strict' in {path} is {strict!r}.", advice="Give true or false.")
    for key, table in data.items():
        if key not in registry.family_keys():
            known = ("enable", "strict", *registry.family_keys())
            home = registry.names().get(key)
            advice = f"Options of {key} stand under [{home.name}]." if home else nearest(key, known)
            raise PatchError(f"unknown key {key!r} in {path}.", advice=advice)
        if not isinstance(table, dict):
            raise PatchError(f"{key!r} in {path} is {table!r}.", advice=f"Write a table: [{key}].")
    at = f"of {path}"
    tables = {key: options.checked(registry.family(key), one, f"[{key}] {at}") for key, one in data.items()}
    return Config(None if enable is None else tuple(enable), strict, tables)
