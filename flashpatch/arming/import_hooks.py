"""Call back once a module has finished executing: at once, or when its import ends.

One finder at the head of ``sys.meta_path`` gives modules that are waited for a loader that calls back when the
real one is done, inside the import: other threads get the module when the callbacks have run. This file imports
next to nothing, since processes that never import a framework load it too."""

from __future__ import annotations

import _thread
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Callback = Callable[[ModuleType], None]

if not TYPE_CHECKING:
    ModuleSpec = type(sys.__spec__)  # importing importlib.machinery would take longer

_lock = _thread.RLock()
"""Guards the three below; no callback and no other finder runs under it."""
_awaited: dict[str, list[Callback]] = {}
"""Callbacks by the module they wait for. They stay until an import of it succeeds."""
_executing: dict[str, int] = {}
"""Modules that `_Loader` is at, callbacks included: how many times."""
_finding: set[tuple[int, str]] = set()
"""Thread and module for which the finder is asking the other finders."""


def when_ready(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` when module ``name`` is ready; an error in it never reaches the importer.

    A module that is loaded is ready now, one that is still executing when its import ends, any other when somebody imports it.
    The callback must read for itself whether it is still wanted, and may be called more than once."""

    def guarded(module: ModuleType) -> None:
        try:
            callback(module)
        except Exception:
            import logging

            logger = logging.getLogger("flashpatch")
            logger.exception("hook on %s failed; the module is imported unpatched", name)

    with _lock:
        module = sys.modules.get(name)
        if module is None or name in _executing:
            _awaited.setdefault(name, []).append(guarded)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
            return
    if not _await_import(module, guarded):
        guarded(module)


def is_ready(name: str) -> bool:
    """Whether a module is loaded and no import of it is under way: `when_ready` would call back at once."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name in sys.modules and name not in _executing and not getattr(spec, "_initializing", False)


class _Finder:
    """Finds modules that are waited for as the finders behind it do, and has them loaded by `_Loader`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        asked = _thread.get_ident(), name
        if name not in _awaited or asked in _finding:
            return None
        _finding.add(asked)
        try:
            spec = self._find(name, path, target)
        finally:
            _finding.discard(asked)
        if spec is not None and hasattr(spec.loader, "exec_module") and name not in sys.modules:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]  # has what the import system calls
        return spec

    def _find(self, name: str, path: Any, target: Any) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else finders
        for finder in behind:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(name, path, target) if find_spec is not None else None
            if spec is not None:
                return spec
        return None


_finder = _Finder()


class _Loader:
    """Stands for a module's loader until the module executes, and calls back afterwards."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name == "_real":  # of an object that was made without __init__, by copying
            raise AttributeError(name)
        return getattr(self._real, name)

    def exec_module(self, module: ModuleType) -> None:
        if getattr(module, "__loader__", None) is self:  # the module keeps its own loader
            module.__loader__ = self._real
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.loader is self:
            spec.loader = self._real
        name = module.__name__
        with _lock:
            _executing[name] = _executing.get(name, 0) + 1
        try:
            self._real.exec_module(module)
            while callbacks := _take(name):
                for callback in callbacks:
                    callback(sys.modules.get(name, module))
        except BaseException:
            with _lock:
                _leave(name)
            raise


def _take(name: str) -> list[Callback]:
    """The callbacks of a module that has executed; when there are none, it is done with."""
    with _lock:
        callbacks = _awaited.pop(name, [])
        if not callbacks:
            _leave(name)
        return callbacks


def _leave(name: str) -> None:
    left = _executing.pop(name, 1) - 1
    if left:
        _executing[name] = left


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
    # Another thread ended the import in between: the thread that takes the callback out of the list calls it.
    spec.__class__ = ModuleSpec
    try:
        waiting.remove(callback)
    except ValueError:
        return True
    return False


class _WatchedSpec(ModuleSpec):
    """The spec of a module whose import began before a callback waited for it. The import system ends an import
    by clearing ``_initializing``."""

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


def _after_fork() -> None:
    """In a forked child: other threads of the parent, and the imports they were at, are not here."""
    global _lock
    _lock = _thread.RLock()
    mine = _thread.get_ident()
    _finding.difference_update([asked for asked in _finding if asked[0] != mine])


os.register_at_fork(after_in_child=_after_fork)
