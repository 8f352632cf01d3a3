"""Spare an engine the visits to what was imported: with them a tiny one takes five times as long.

vLLM thaws and collects a million imported objects several times per engine, each page of which a forked process then
copies, and looks for its kernels through all modules."""

import functools
import gc
import sys
import types
from collections.abc import Callable
from typing import Any

_freeze = gc.freeze


def spare() -> None:
    """Freeze all objects that exist, for good, and leave out vLLM's own freezing and thawing of everything.

    What an engine adds afterwards is collected as ever."""
    gc.collect()
    _freeze()
    gc.freeze = gc.unfreeze = lambda: None
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # before vLLM 0.31
        return
    own = dispatcher._rebind_kernels
    if not isinstance(own, functools.partial):
        dispatcher._rebind_kernels = functools.partial(_rebind_in_vllm, dispatcher, own)


def inspect_here() -> None:
    """Let vLLM look at a model's class in this process.

    Stock vLLM starts another one for each class, which imports vLLM again, only to keep CUDA uninitialised here."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()


def _rebind_in_vllm(dispatcher: types.ModuleType, rebind: Callable[[Any], None], overrides: Any) -> None:
    """Do what vLLM's function does, with its own modules only: no other refers to its kernels."""
    own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    dispatcher.sys = types.SimpleNamespace(modules=own)
    try:
        rebind(overrides)
    finally:
        dispatcher.sys = sys
