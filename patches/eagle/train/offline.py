"""Train a drafter on samples that are there, without a job beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashpatch.patches.eagle.errors import eagle_error
from flashpatch.patches.eagle.train.coordinator import Coordinator
from flashpatch.patches.eagle.train.settings import WorkerSettings

_POLL_SECONDS = 0.2


def train_for(
    settings: WorkerSettings, seconds: float, report: Callable[[Mapping[str, Any]], None]
) -> tuple[Path, dict[str, Any]]:
    """Train for ``seconds`` in a process of its own; return the drafter's folder and the last step's figures.

    Args:
        report: called with every event of the worker.

    Raises:
        PatchError: the worker died for good, or wrote no drafter.
    """
    coordinator = Coordinator(settings)
    try:
        began: float | None = None
        ended = False
        while coordinator.state != "given up" and not ended:
            if coordinator.state == "training":
                began = began or time.monotonic()
            elif coordinator.state == "down":  # at first, and after a death: from its last checkpoint
                gone = time.monotonic() - began if began else 0.0
                coordinator.train(max(1.0, seconds - gone))
            for event in coordinator.poll():  # one call may see the start and the end of a slice
                report(event)
                ended = ended or coordinator.ends_slice(event)
            if not ended:
                time.sleep(_POLL_SECONDS)
        if coordinator.state == "given up" or coordinator.drafter is None:
            raise eagle_error(
                "drafter training",
                f"no drafter was trained: {coordinator.problem or 'too few samples'}.",
                "Give more prompts, or more seconds.",
            )
        return coordinator.drafter, coordinator.figures
    finally:
        coordinator.close()
