"""The one entry behind every front door: ``.pth``, ``.start``, ``sitecustomize``, frameworks' plugins.

It runs before anything else is imported, often twice in a process, and in processes that have nothing to do
with any framework; so it looks at one variable first and imports nothing when that says no, and next to
nothing until a framework is imported (`flashpatch.arming.standby`)."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def start() -> None:
    """Obey ``FLASHPATCH``. Later calls in a process reconcile; nothing is hooked or counted twice.

    A setting that cannot be obeyed is logged as an error and leaves the environment's names off; the first engine or
    trainer raises it.

    Raises:
        PatchError: the setting cannot be obeyed and ``FLASHPATCH_STRICT`` is on."""
    if os.environ.get("FLASHPATCH", "") in ("", "0"):
        return
    from flashpatch.arming import standby

    if not standby.start(_take_over):
        from flashpatch import api

        api.start()


def _take_over(environment: tuple[str | None, str | None]) -> "Callable[[], None]":
    """Load the engine for `standby.start`; return what arms the patches whose modules are there."""
    from flashpatch import api, engine

    api.adopt(environment)
    return engine.manager.sweep
