"""Find the source of each setting in force: a variable, the config file, a preset or a default."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from flashpatch import registry
from flashpatch.commands import original_env
from flashpatch.ledger import files
from flashpatch.settings import selections


class Setting(NamedTuple):
    """Hold one setting and its source: a variable, a file, ``name 'int8'`` for a preset, or ``default``."""

    name: str
    value: Any
    source: str


def in_force() -> list[Setting]:
    """Return the settings of a process started with this environment. Raises PatchError for invalid ones."""
    with original_env.environment():
        ledger = "FLASHPATCH_LEDGER" if os.environ.get("FLASHPATCH_LEDGER") else "default"
        return [*_settings(), Setting("ledger", str(files.directory()), ledger)]


def _settings() -> Iterator[Setting]:
    selection = selections.from_environment(selections.NOTHING)
    if not selection.choices:
        asked = os.environ.get("FLASHPATCH")
        yield Setting("names", [], {None: "default", "1": "config file"}.get(asked, "FLASHPATCH"))
        return
    loaded = selections.config()
    file = os.environ.get("FLASHPATCH_CONFIG") or selections.CONFIG
    inherited = "FLASHPATCH_RESOLVED" if _inherited() else ""
    yield Setting("names", list(selection.names), inherited or _names_source(loaded, file))
    strict = "FLASHPATCH_STRICT" if "FLASHPATCH_STRICT" in os.environ else ""
    strict = strict or (file if loaded.strict is not None else "default")
    yield Setting("strict", selection.strict, inherited or strict)
    for family, choice in selection.choices.items():
        preset = registry.family_names(registry.families()[family])[choice.name]
        for option, value in choice.options.items():
            source = f"name {choice.name!r}" if option in preset else ""
            source = source or (file if option in loaded.tables.get(family, {}) else "default")
            yield Setting(f"{family}.{option}", value, inherited or source)


def _names_source(loaded: selections.Config, file: str) -> str:
    if os.environ["FLASHPATCH"] != "1":
        return "FLASHPATCH"
    return "default" if loaded.enable is None else file


def _inherited() -> bool:
    """Whether a parent's resolved data counts: only for the value of FLASHPATCH it was made from."""
    resolved = os.environ.get("FLASHPATCH_RESOLVED", "")
    return bool(resolved) and json.loads(resolved)["from"] == os.environ["FLASHPATCH"]
