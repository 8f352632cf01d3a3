"""Write an expected ledger row for each engine process that is started."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashpatch import ledger
from flashpatch.record import Contract, Patch


def on_cores(original, self, *args: Any, **kwargs: Any):
    """Around ``CoreEngineProcManager.__init__``."""
    original(self, *args, **kwargs)
    for process in self.processes:
        ledger.expect(process.pid, roles=("engine-core",), families=("fp8",))


def on_workers(original, self, *args: Any, **kwargs: Any):
    """Around ``MultiprocExecutor._init_executor``."""
    result = original(self, *args, **kwargs)
    for handle in self.workers:
        ledger.expect(handle.proc.pid, roles=("worker",), families=("fp8",))
    return result


_patch = partial(
    Patch,
    requires="vllm>=0.24",
    evidence="optional",
    why="A process that never loaded FlashPatch writes nothing, so its parent records that it is expected.",
    how="After the start, writes an expected row with the child's pid and start time.",
    remove_when="never: this is the evidence itself.",
)

CORES = _patch(
    id="fp8.vllm.core_engine_proc_manager_init",
    when="child=engine-core",
    targets=("vllm.v1.engine.utils:CoreEngineProcManager.__init__",),
    wrapper=on_cores,
    contract=Contract(mentions=("self.processes",)),
    scope=frozenset({"driver"}),
)

WORKERS = _patch(
    id="fp8.vllm.init_executor",
    when="child=worker",
    targets=("vllm.v1.executor.multiproc_executor:MultiprocExecutor._init_executor",),
    wrapper=on_workers,
    contract=Contract(mentions=("self.workers",)),
    scope=frozenset({"engine-core"}),
)
