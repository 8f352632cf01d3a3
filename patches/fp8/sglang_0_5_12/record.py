"""What all patches for SGLang 0.5.12 to 0.5.20 have in common."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from flashpatch.decorate import Own, Patches
from flashpatch.patches.fp8.sglang.schedulers import REMOVE_WHEN

FRAMEWORK = "fp8.sglang_0_5_12"
"""Beginning of the ids."""

REQUIRES = "sglang>=0.5.12,<0.5.21"

NAMESPACES = {
    "0.5.17": tuple(
        f"sglang.srt.runtime_context:get_{name}" for name in ("device", "exec", "lora", "memory", "parallel")
    )
}
"""What an engine's settings are read from, from that version on."""


def for_old_sglang(**shared: Any) -> Patches:
    """Return the patches of a file, that share what is given."""
    return Patches("fp8", REQUIRES, framework="sglang_0_5_12", **{"remove_when": REMOVE_WHEN, **shared})


def as_newer(function: Callable[..., Any]) -> Own:
    """Return why and how, as the patch for newer versions says it that a function is."""
    newer = Patches.of(function)
    return {"why": newer.why, "how": newer.how}


def namespaces() -> ModuleType | None:
    """Return SGLang's module of `NAMESPACES`; None if this version reads the settings from its arguments."""
    try:
        from sglang.srt import runtime_context
    except ImportError:  # before 0.5.14
        return None
    return runtime_context if hasattr(runtime_context, "get_exec") else None
