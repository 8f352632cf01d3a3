"""Registration of operators under ``torch.ops.sgl_kernel``."""

from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")


VERSION = tuple(int(part) for part in metadata.version("sglang").split(".")[:3])
"""Of the installed SGLang: older ones call some operators by fewer arguments."""


def operator(schema: str, when: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function is the operator of this schema; ``when`` False: it is not registered."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if not when:
            return function
        _LIBRARY.define(schema)
        _LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
        return function

    return register


def name_only(*names: str) -> None:
    """Operators that are looked up while model files are imported, and must never be called."""
    for name in names:
        _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
