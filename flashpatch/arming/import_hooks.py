"""Call back once a module has finished executing: at once, or when its import ends."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import wrapt

log = logging.getLogger("flashpatch")

Callback = Callable[[ModuleType], None]


def when_ready(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` when module ``name`` is ready; an error in it never reaches the importer.

    A module that is loaded is ready now, one that is still executing when its import ends, any other when
    somebody imports it. The callback must read for itself whether it is still wanted, and may be called
    more than once.
    """

    def guarded(module: ModuleType) -> None:
        try:
            callback(module)
        except Exception:
            log.exception("hook on %s failed; the module is imported unpatched", name)

    module = sys.modules.get(name)
    if module is None:
        wrapt.register_post_import_hook(guarded, name)
    elif not _await_import(module, guarded):
        guarded(module)


def _await_import(module: ModuleType, callback: Callback) -> bool:
    """Arrange for ``callback`` at the end of an import that is under way; False when none is."""
    spec = getattr(module, "__spec__", None)
    if type(spec) not in (ModuleSpec, _WatchedSpec) or not getattr(spec, "_initializing", False):
        return False
    waiting = vars(spec).setdefault("_flashpatch_waiting", [])
    waiting.append(callback)
    spec.__class__ = _WatchedSpec
    if getattr(spec, "_initializing", False):
        return True
    # Another thread ended the import in between: whoever takes the callback out of the list calls it.
    spec.__class__ = ModuleSpec
    return not _take(waiting, callback)


def _take(waiting: list[Callback], callback: Callback) -> bool:
    try:
        waiting.remove(callback)
    except ValueError:
        return False
    return True


class _WatchedSpec(ModuleSpec):
    """The spec of a module under import. The import system ends an import by clearing ``_initializing``."""

    @property
    def _initializing(self) -> bool:
        return vars(self).get("_initializing", False)

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        if not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            module = sys.modules.get(self.name)
            waiting = vars(self).pop("_flashpatch_waiting", [])
            while waiting:
                callback = waiting.pop(0)
                if module is not None:
                    callback(module)
