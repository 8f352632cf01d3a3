"""The environment as the user gave it to this process."""

from __future__ import annotations

import os
import posix
from collections.abc import Iterator
from contextlib import contextmanager

from flashpatch import forward


def variables() -> dict[str, str]:
    """Our variables as they were when the interpreter started.

    A process started with ``FLASHPATCH`` exports what it resolved for its children; a command reports what
    it was given, not what its own start made of it.
    """
    before = {os.fsdecode(name): os.fsdecode(value) for name, value in posix.environ.items()}
    return {name: before[name] for name in forward.VARIABLES if name in before}


@contextmanager
def environment() -> Iterator[None]:
    """Our variables in ``os.environ`` are those of `variables` inside the block."""
    now = {name: os.environ.pop(name) for name in forward.VARIABLES if name in os.environ}
    os.environ.update(variables())
    try:
        yield
    finally:
        for name in forward.VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(now)
