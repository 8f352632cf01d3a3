"""The logger ``flashpatch`` and the level that ``FLASHPATCH_LOG`` asks for."""

from __future__ import annotations

import logging
import os

from flashpatch.errors import PatchError

log = logging.getLogger("flashpatch")


def configure() -> None:
    """Obey ``FLASHPATCH_LOG``: records from that level up go to standard error, through a handler on this logger alone.

    Unset, warnings go where the program sends them, and to standard error if no handler of its root takes them: vLLM 0.24's
    server sets the root and all its handlers to ERROR. Raises PatchError if there is no such level."""
    level = os.environ.get("FLASHPATCH_LOG", "").strip().upper()
    if level and level not in logging.getLevelNamesMapping():
        raise PatchError(f"FLASHPATCH_LOG is {level!r}.", advice="Set it to DEBUG, INFO, WARNING or ERROR.")
    log.setLevel(level or log.level or logging.WARNING)
    if not log.handlers or (level and log.propagate):
        handler = logging.StreamHandler()
        if level:
            handler.setFormatter(logging.Formatter("%(levelname)s %(process)d %(name)s: %(message)s"))
        else:
            handler.addFilter(lambda record: all(record.levelno < one.level for one in logging.root.handlers))
        log.handlers, log.propagate = [handler], not level
