"""Write an expected ledger row for each engine process that is started."""

from __future__ import annotations

from typing import Any

from flashpatch import ledger
from flashpatch.decorate import Patches

patches = Patches(
    "fp8",
    "vllm>=0.24",
    evidence="optional",
    why="A process that never loaded FlashPatch writes nothing, so its parent records that it is expected.",
    remove_when="never: this is the evidence itself.",
)


@patches.wrap(
    "vllm.v1.engine.utils:CoreEngineProcManager.__init__",
    relies_on="self.processes",
    scope="driver",
    when="child=engine-core",
)
def core_engine_proc_manager_init(original, self, *args: Any, **kwargs: Any):
    """Write an expected row with the child's pid and start time, once it runs."""
    original(self, *args, **kwargs)
    for process in self.processes:
        ledger.expect(process.pid, roles=("engine-core",), families=("fp8",))


@patches.wrap(
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor._init_executor",
    relies_on="self.workers",
    scope="engine-core",
    when="child=worker",
)
def init_executor(original, self, *args: Any, **kwargs: Any):
    """Write an expected row with the child's pid and start time, once it runs."""
    result = original(self, *args, **kwargs)
    for handle in self.workers:
        ledger.expect(handle.proc.pid, roles=("worker",), families=("fp8",))
    return result
