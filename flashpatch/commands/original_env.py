"""Recover the environment that the user gave this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashpatch.settings import child_env


def variables() -> dict[str, str]:
    """Return FlashPatch's variables as they were when this process was started.

    A process started with ``FLASHPATCH`` exports what it resolved for its children; a command reports what
    it was given, not what its own start made of it. Without ``/proc`` the two cannot be told apart.
    """
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
