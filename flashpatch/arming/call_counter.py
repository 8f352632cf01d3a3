"""Count calls exactly without a lock on the hot path, and notify the ledger of changes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any


class Changes:
    """Notify a listener that some count changed, once until the listener has read the counts.

    Attributes:
        dirty: True from the first change until `settle`.
        listener: called on the first change, with True when a patch was called for the first time; the
            ledger's ``touch``. It decides when to write."""

    __slots__ = ("dirty", "listener")

    def __init__(self) -> None:
        self.dirty = False
        self.listener: Callable[[bool], None] | None = None

    def report(self, first: bool = False) -> None:
        """Report a change: a patch's first call always, any other unless one is reported already."""
        if first or not self.dirty:
            self.dirty = True
            if self.listener is not None:
                self.listener(first)

    def settle(self) -> None:
        """Mark the counts as read; later changes are reported again."""
        self.dirty = False


changes = Changes()


class CallCounter:
    """Count the calls of one patch, and enable or disable its wrapper.

    ``next()`` on an `itertools.count` is atomic, so concurrent calls are counted exactly. Its ``repr`` says how far it
    has come without taking a number, and without a lock, which a signal handler might meet held.

    Attributes:
        patch_id: whose calls these are.
        open: while False the replacement passes calls through to the original, uncounted."""

    __slots__ = ("__weakref__", "_baseline", "_called", "_count", "_tick", "open", "patch_id")

    def __init__(self, patch_id: str) -> None:
        self.patch_id = patch_id
        self.open = True
        self._count = itertools.count()
        self._tick = self._count.__next__
        self._baseline = 0
        self._called = False
        _counters.add(self)

    def hit(self) -> None:
        """Count one call."""
        self._tick()
        if not self._called:
            self._called = True
            changes.report(first=True)
        elif not changes.dirty:
            changes.report()

    def calls(self) -> int:
        """Return the calls counted in this process."""
        return self._so_far() - self._baseline

    def reset(self) -> None:
        """Count from zero again, as a forked child must."""
        self._baseline = self._so_far()
        self._called = False

    def _so_far(self) -> int:
        return int(repr(self._count).removeprefix("count(").removesuffix(")"))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a new counter: counts belong to one process."""
        return CallCounter, (self.patch_id,)


_counters: weakref.WeakSet[CallCounter] = weakref.WeakSet()


def after_fork() -> None:
    """Reset every count in a forked child."""
    changes.settle()
    for counter in list(_counters):
        counter.reset()
