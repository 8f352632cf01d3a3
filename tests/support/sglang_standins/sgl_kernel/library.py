"""Registration of operators under ``torch.ops.sgl_kernel``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")


def operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function is the operator of this schema."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
        return function

    return register


def name_only(*names: str) -> None:
    """Operators that are looked up while model files are imported, and must never be called."""
    for name in names:
        _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
