"""Write an expected ledger row for each scheduler process that is started."""

from __future__ import annotations

from typing import Any

from flashpatch import ledger
from flashpatch.record import Contract, Patch


def on_launch(original, cls, *args: Any, **kwargs: Any):
    """Around ``Engine._launch_scheduler_processes``."""
    result = original(cls, *args, **kwargs)
    for process in result[1] or ():
        ledger.expect(process.pid, roles=("engine-core",), families=("fp8",))
    return result


PATCH = Patch(
    id="fp8.sglang.launch_scheduler_processes",
    targets=("sglang.srt.entrypoints.engine:Engine._launch_scheduler_processes",),
    requires="sglang>=0.5.21",
    wrapper=on_launch,
    contract=Contract(params=("server_args",), mentions=("scheduler_procs",)),
    evidence="optional",
    when="child=engine-core",
    scope=frozenset({"driver"}),
    why="A process that never loaded FlashPatch writes nothing, so its parent records that it is expected.",
    how="After the start, writes an expected row with the child's pid and start time.",
    remove_when="never: this is the evidence itself.",
)
