"""Let an engine core ask its workers after it slept, and refuse to sleep if nothing could bring the weights back."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashpatch.patches.fp8.vllm import executor_door
from flashpatch.patches.fp8.vllm.scheduler_gate import CORE, gates
from flashpatch.record import Contract, Patch


def on_sleep(original, self, *args: Any, **kwargs: Any):
    """Around ``EngineCore.sleep``: a refusal comes before it pauses the scheduler and ends requests."""
    if self in gates:
        executor_door.refuse(self.vllm_config, "sleep", args, kwargs)
    return on_wake_up(original, self, *args, **kwargs)


def on_wake_up(original, self, *args: Any, **kwargs: Any):
    """Around ``EngineCore.wake_up``, which reaches the workers past ``collective_rpc``, as ``sleep`` does."""
    gate = gates.get(self)
    try:
        return original(self, *args, **kwargs)
    finally:
        if gate is not None:
            gate.workers_changed()


_patch = partial(
    Patch,
    requires="vllm>=0.24",
    scope=frozenset({"engine-core"}),
    contract=Contract(mentions=("self.model_executor",)),
    evidence="optional",
    needs=("fp8.vllm.engine_core_init",),
    why="Sleep level 2 discards weights in the workers; an engine core that is not told would schedule on them, and "
    "the worker's own refusal would end it.",
    how="Asks the workers for their policy before the next step; refuses level 2 if experts span engines, as "
    "updates are refused there.",
    remove_when="vLLM refuses to schedule while an update is open or has failed, and resets its caches at commit.",
)

SLEEP = _patch(
    id="fp8.vllm.engine_core_sleep",
    when="anywhere=fp8.vllm.worker_sleep",
    targets=(f"{CORE}.sleep",),
    wrapper=on_sleep,
)

WAKE_UP = _patch(
    id="fp8.vllm.engine_core_wake_up",
    when="anywhere=fp8.vllm.worker_wake_up",
    targets=(f"{CORE}.wake_up",),
    wrapper=on_wake_up,
)
