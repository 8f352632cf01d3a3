"""Targets of the records for SGLang, and the fields that the records share."""

from __future__ import annotations

from functools import partial

from flashpatch.record import Patch

_SPECULATIVE = "sglang.srt.speculative.eagle_worker_v2"
WORKER = f"{_SPECULATIVE}:EAGLEWorkerV2"
DRAFTER = f"{_SPECULATIVE}:EagleDraftWorker"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"

WorkerPatch = partial(
    Patch,
    requires="sglang>=0.5.21",
    scope=frozenset({"worker"}),
    remove_when="SGLang hands out hidden states, chooses its configuration by what it brings per second, and judges "
    "new drafter weights.",
)
