"""Find the objects of given classes that exist already."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from typing import Any

VLLM = {"vllm.v1.engine.llm_engine": "LLMEngine", "vllm.v1.engine.async_llm": "AsyncLLM"}
SGLANG = {"sglang.srt.managers.tokenizer_manager": "TokenizerManager"}
"""Modules and classes of which there is one object for each engine, in the process that opened it."""


def of_modules(classes: Mapping[str, str]) -> list[Any]:
    """Return the instances of classes, given by module, of those modules that are imported."""
    kinds = [getattr(sys.modules[module], name) for module, name in classes.items() if module in sys.modules]
    return of(*kinds) if kinds else []


def of(*kinds: type) -> list[Any]:
    """Return the instances of classes in this process, also those that the garbage collector was told to leave alone.

    vLLM freezes its heap when an engine has started (``gc.freeze``), and frozen objects are in no list of the
    collector's; they are thawed for the look and frozen again."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    try:
        # isinstance() would ask an object's __class__, at which lazy proxies, as openai's, import what they stand for.
        return [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    finally:
        if frozen:
            gc.freeze()
