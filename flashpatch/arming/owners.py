"""Find the owner of an attribute: the framework that defines it, or a tool that wrapped it first."""

from __future__ import annotations

import functools
import inspect
import linecache
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any


def is_a(thing: Any, *kinds: type) -> bool:
    """Check ``isinstance`` without trusting a proxy's ``__class__``."""
    return issubclass(type(thing), kinds)


def underlying(raw: Any) -> Any:
    """Return the plain callable in a class or static method, property or cached property; else ``raw``."""
    if is_a(raw, classmethod, staticmethod):
        return raw.__func__
    if is_a(raw, property):
        return raw.fget
    if is_a(raw, functools.cached_property):
        return raw.func
    return raw


def describe(raw: Any) -> str:
    """Return ``module.qualname`` of the code that made an object, despite ``functools.wraps``."""
    made = underlying(raw)
    if is_a(made, FunctionType):
        return f"{_home(made)}.{made.__code__.co_qualname}"
    named = made if is_a(made, type) else type(made)
    return f"{named.__module__}.{named.__qualname__}"


def foreign(raw: Any, module: str) -> str | None:
    """Return the other owner of ``raw``, which ``module`` should have defined; None if it has none.

    A decorator of another package is the framework's own doing when the source shows it above the
    definition, as ``@torch.inference_mode()`` is in vLLM."""
    made = underlying(raw)
    package = _package(module)
    if _package(_home(made)) == package or _decorated(made, package):
        return None
    return describe(raw)


def _home(made: Any) -> str:
    if is_a(made, FunctionType):
        return made.__globals__.get("__name__", "")
    if is_a(made, type):
        return made.__module__
    if is_a(made, BuiltinFunctionType, WrapperDescriptorType, MethodDescriptorType):
        return getattr(made, "__objclass__", made).__module__ or ""
    return type(made).__module__


def _package(module: str) -> str:
    return module.partition(".")[0]


def _decorated(made: Any, package: str) -> bool:
    inner = inspect.unwrap(made) if callable(made) else made
    if not is_a(inner, FunctionType) or _package(_home(inner)) != package:
        return False
    code = inner.__code__
    first = linecache.getline(code.co_filename, code.co_firstlineno, inner.__globals__)
    return first.lstrip().startswith("@")
