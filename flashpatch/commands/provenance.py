"""Find the source of each setting in force: a variable, the config file, a preset or a default."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flashpatch import registry
from flashpatch.ledger import files
from flashpatch.settings import child_env, selections


def variables() -> dict[str, str]:
    """Return FlashPatch's variables as they were when this process was started.

    A process started with ``FLASHPATCH`` exports what it resolved for its children; a command reports what
    it was given, not what its own start made of it. Without ``/proc`` the two cannot be told apart."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        before = dict(os.environ)
    else:
        pairs = (entry.partition(b"=") for entry in entries)
        before = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    return {name: before[name] for name in child_env.VARIABLES if name in before}


@contextmanager
def environment() -> Iterator[None]:
    """Set FlashPatch's variables in ``os.environ`` to those of `variables` inside the block."""
    before = variables()
    now = {name: os.environ.pop(name) for name in child_env.VARIABLES if name in os.environ}
    os.environ.update(before)
    try:
        yield
    finally:
        for name in child_env.VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(now)


class Setting(NamedTuple):
    """Hold one setting and its source: a variable, a file, ``name 'int8'`` for a preset, or ``default``."""

    name: str
    value: Any
    source: str


def in_force() -> list[Setting]:
    """Return the settings of a process started with this environment. Raises PatchError for invalid ones."""
    with environment():
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
    resolved = json.loads(os.environ.get("FLASHPATCH_RESOLVED") or "{}")
    # a parent's data counts only for the value of FLASHPATCH it was made from
    inherited = "FLASHPATCH_RESOLVED" if resolved.get("from") == os.environ["FLASHPATCH"] else ""
    enabled_by = "default" if loaded.enable is None else file
    source = enabled_by if os.environ["FLASHPATCH"] == "1" else "FLASHPATCH"
    yield Setting("names", list(selection.names), inherited or source)
    strict = "FLASHPATCH_STRICT" if "FLASHPATCH_STRICT" in os.environ else ""
    strict = strict or (file if loaded.strict is not None else "default")
    yield Setting("strict", selection.strict, inherited or strict)
    for family, choice in selection.choices.items():
        preset = registry.family_names(registry.families()[family])[choice.name]
        for option, value in choice.options.items():
            source = f"name {choice.name!r}" if option in preset else ""
            source = source or (file if option in loaded.tables.get(family, {}) else "default")
            yield Setting(f"{family}.{option}", value, inherited or source)
