"""Refuse to update engines that were opened before FlashPatch was on: nothing follows their weights."""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any

from flashpatch import api
from flashpatch.errors import PatchError
from flashpatch.patches.fp8 import instances
from flashpatch.record import Contract, Patch

_late: weakref.WeakSet[Any] = weakref.WeakSet()
_lost: weakref.WeakSet[Any] = weakref.WeakSet()
_configs: list[weakref.ref[Any]] = []  # of engines that are opened while FlashPatch is on

#: Methods of vLLM's workers that write no weight, by which an engine may be asked nevertheless.
_WRITES_NOTHING = frozenset(
    {
        "check_health",
        "compute_weight_checksums",
        "get_model_inspection",
        "get_supported_tasks",
        "list_loras",
        "profile",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "sleep",
        "synchronize_device",
        "wake_up",
        api.CHECKSUM,
    }
)


def opened_with(config: Any) -> None:
    """Note the configuration of an engine that is being opened while FlashPatch is on."""
    _configs[:] = [known for known in _configs if known() is not None]
    _configs.append(weakref.ref(config))


def lost(core: Any) -> None:
    """Note that an engine core of this process has lost its gate: FlashPatch was switched off."""
    _lost.add(core)


def find() -> str | None:
    """Find the engines of this process that were opened without FlashPatch; return a sentence if there are any."""
    kinds = [
        getattr(sys.modules[module], name)
        for module, name in (
            ("vllm.v1.engine.llm_engine", "LLMEngine"),
            ("vllm.v1.engine.async_llm", "AsyncLLM"),
        )
        if module in sys.modules
    ]
    known = {id(known()) for known in _configs}
    _late.clear()
    for one in instances.of(*kinds) if kinds else ():
        core = getattr(one.engine_core, "engine_core", None)  # if it is in this process
        if id(one.vllm_config) not in known or core in _lost:
            _late.add(one)
    if not _late:
        return None
    return f"{len(_late)} vLLM engine(s) exist already and take no weight updates; build them after enabling."


def check(method: Any) -> None:
    """Check that a call to the workers of an engine without a gate writes no weights.

    Raises:
        PatchError: it may write some.
    """
    if isinstance(method, str) and method in _WRITES_NOTHING:
        return
    name = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
    raise PatchError(
        f"this engine was opened before fp8, int8 or bf16 was enabled, so nobody would follow the weights that {name} "
        "may write",
        patch=SYNC.id,
        advice="Open the engine after flashpatch.enable(); to update it as stock vLLM does, call flashpatch.disable().",
    )


def on_collective_rpc(original, self, method: Any, *args: Any, **kwargs: Any):
    """Around ``collective_rpc`` of vLLM's synchronous and asynchronous engine."""
    if self in _late:
        check(method)
    return original(self, method, *args, **kwargs)


_patch = partial(
    Patch,
    requires="vllm>=0.24",
    wrapper=on_collective_rpc,
    contract=Contract(params=("method",)),
    evidence="fault",
    scope=frozenset({"driver"}),
    needs=("fp8.vllm.collective_rpc",),
    why="An engine that was opened before FlashPatch was on updates as stock does: old prefix cache, no version, no "
    "word of it.",
    how="Refuses its calls that may write weights.",
    remove_when="never: such an engine cannot be followed.",
)

SYNC = _patch(
    id="fp8.vllm.llm_engine_collective_rpc", targets=("vllm.v1.engine.llm_engine:LLMEngine.collective_rpc",)
)

ASYNC = _patch(
    id="fp8.vllm.async_llm_collective_rpc", targets=("vllm.v1.engine.async_llm:AsyncLLM.collective_rpc",)
)
