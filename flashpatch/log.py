"""The logger ``flashpatch`` and the level that ``FLASHPATCH_LOG`` asks for."""

from __future__ import annotations

import logging
import os

from flashpatch.errors import PatchError

log = logging.getLogger("flashpatch")


def configure() -> None:
    """Obey ``FLASHPATCH_LOG``. Unset, nothing is configured: warnings go where the program sends them.

    Set, records from that level up go to standard error as well, through a handler on this logger alone.

    Raises:
        PatchError: no such level."""
    level = os.environ.get("FLASHPATCH_LOG", "").strip().upper()
    if not level:
        return
    if level not in logging.getLevelNamesMapping():
        raise PatchError(f"FLASHPATCH_LOG is {level!r}.", advice="Set it to DEBUG, INFO, WARNING or ERROR.")
    log.setLevel(level)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(process)d %(name)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
