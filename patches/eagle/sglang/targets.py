"""What the records of this folder have in common."""

from __future__ import annotations

from typing import Any

_SPECULATIVE = "sglang.srt.speculative.eagle_worker_v2"
WORKER = f"{_SPECULATIVE}:EAGLEWorkerV2"
DRAFTER = f"{_SPECULATIVE}:EagleDraftWorker"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

TEXT: dict[str, Any] = dict(
    requires="sglang>=0.5.21",
    tested=("0.5.23",),
    scope=frozenset({"worker"}),
    remove_when="SGLang hands out hidden states, chooses its configuration by what it brings per second, and judges "
    "new drafter weights.",
)
