"""Wait for a framework with nothing loaded but an index; most processes of a job never import one.

`start` reads the environment, exports what it means to children, and watches the target
modules of the chosen families. When the first of them has been imported, or code calls a function of the
engine, `wake` lets the engine take over, by the function that `start` was given. What takes more than the index (a third
party's family, an error to report, a framework that is loaded already) is left to the engine at once."""

from __future__ import annotations

import _thread
import os
import sys

from flashpatch import index
from flashpatch.arming import import_hooks
from flashpatch.errors import PatchError
from flashpatch.ledger import files, nodes
from flashpatch.settings import selections

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from flashpatch.settings.selections import Selection

_LEVELS = ("", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


_pending: Selection | None = None
"""What `wake` will switch on; None before `start` and after `wake`."""

_exported: tuple[str | None, str | None] = (None, None)
"""The values of ``FLASHPATCH`` and ``FLASHPATCH_RESOLVED`` that say so."""

_take_over: Callable[[tuple[str | None, str | None]], Callable[[], None]] | None = None
"""What `start` was given."""

_lock = _thread.RLock()
_waking = False
"""True while the lock's holder loads the engine; its calls must not re-enter `wake`."""


def start(take_over: Callable[[tuple[str | None, str | None]], Callable[[], None]]) -> bool:
    """Obey ``FLASHPATCH`` as far as possible without the engine; later calls in a process reconcile.

    Return False when the engine has to decide: it is loaded, or the index is not enough. ``take_over`` loads it, switches
    on what the environment it is given exported, and returns what arms the patches whose modules are there."""
    global _pending, _exported, _take_over
    if _pending is not None:
        if _environment() != _exported:
            return False
        if any(import_hooks.is_ready(name) for name in _watched(_pending)):  # imported past our finder
            wake()
        elif {"vllm", "sglang"} & sys.modules.keys():  # an engine asks its plugins
            from importlib.util import find_spec

            if not any(find_spec(name.partition(".")[0]) for name in _watched(_pending)):
                said = f"{', '.join(_pending.names)} changes nothing here: what it acts on is not installed"
                print(f"flashpatch: {said} (flashpatch doctor)", file=sys.stderr)
        return True
    if "flashpatch.api" in sys.modules or "flashpatch.engine" in sys.modules:
        return False
    selection = _resolved()
    if selection is None or any(module.partition(".")[0] in sys.modules for module in _watched(selection)):
        return False
    selections.export(selection)
    _pending, _exported, _take_over = selection, _environment(), take_over
    for name in sorted(_watched(selection)):
        import_hooks.when_ready(name, lambda module: wake())
    files.row_path()  # names the run, and the directory if it is not the usual one, to children
    nodes.watch()
    return True


def wake() -> None:
    """Let the engine take over, if it has not yet. Returns when it watches the modules in our place.

    May be called from any thread and from import hooks: the lock is held while modules of ours are imported
    and bookkeeping is done, never while a patch is applied."""
    global _pending, _waking
    if _pending is None:
        return
    with _lock:
        if _pending is None or _waking:
            return
        _waking = True
        try:
            assert _take_over is not None, "start was given it"
            sweep = _take_over(_exported)
        finally:
            _pending, _waking = None, False
    sweep()


def _watched(selection: Selection) -> set[str]:
    return set().union(*(index.family(name).modules for name in selection.choices))


def _environment() -> tuple[str | None, str | None]:
    return os.environ.get("FLASHPATCH"), os.environ.get("FLASHPATCH_RESOLVED")


def _resolved() -> Selection | None:
    """What the environment means; None when the engine has to say, such as that it is wrong."""
    if os.environ.get("FLASHPATCH_LOG", "").strip().upper() not in _LEVELS:
        return None
    try:
        selection = selections.from_environment(selections.NOTHING)
    except PatchError:
        return None
    return selection if selection.choices and selection.choices.keys() <= {*index.families()} else None


def _after_fork() -> None:
    """In a forked child: a thread of the parent that was waking is not here."""
    global _lock, _waking
    _lock, _waking = _thread.RLock(), False


os.register_at_fork(after_in_child=_after_fork)
