"""Find the objects of given classes that exist already."""

from __future__ import annotations

import gc
from typing import Any


def of(*kinds: type) -> list[Any]:
    """Return the instances of classes in this process, also those that the garbage collector was told to leave alone.

    vLLM freezes its heap when an engine has started (``gc.freeze``), and frozen objects are in no list of the
    collector's; they are thawed for the look and frozen again.
    """
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    try:
        # isinstance() would ask an object's __class__, at which lazy proxies, as openai's, import what they stand for.
        return [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    finally:
        if frozen:
            gc.freeze()
