"""Names in loaded modules that are bound to one object: what ``from x import f`` leaves behind."""

from __future__ import annotations

import sys
from itertools import repeat
from operator import is_
from types import ModuleType
from typing import Any


def swap(old: Any, new: Any) -> None:
    """Rebind every module-level name that *is* ``old`` to ``new``, in all loaded modules.

    Only the dictionaries of modules are read, without running a lazy module's attribute access. Partials,
    registries and attributes of instances that hold ``old`` keep it.
    """
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            namespace = object.__getattribute__(module, "__dict__")
            if any(map(is_, list(namespace.values()), repeat(old))):
                for name, value in list(namespace.items()):
                    if value is old:
                        namespace[name] = new
