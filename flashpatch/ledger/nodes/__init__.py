"""Gather the ledger of a job that runs on several nodes in Ray's key-value store, and read it from there.

Each node has a run directory of its own. One process per directory, connected to Ray and elected by a lock, publishes the files
in it (`published`, called by `agent`); the store lies on Ray's head node, so rows outlive the node that wrote them. A reader
copies them into its own run directory, below ``nodes/`` (`fetch`), where they are kept and read like others (`node`)."""

from __future__ import annotations

import os

from flashpatch.arming import import_hooks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

VARIABLE = "FLASHPATCH_LEDGER_RAY"
"""With 0, the ledger of this process's node stays on the node."""

_watching = False


def watch() -> None:
    """Begin to gather if Ray is imported, unless `VARIABLE` is 0; later calls do nothing."""
    global _watching
    if _watching or os.environ.get(VARIABLE, "").strip() == "0":
        return
    _watching = True
    import_hooks.when_ready("ray._private.worker", _on_ray)


def _on_ray(module: ModuleType) -> None:
    from flashpatch.ledger.nodes import agent

    agent.start()
