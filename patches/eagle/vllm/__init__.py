"""Patch vLLM's engine."""

from __future__ import annotations

from flashpatch.patches.eagle.vllm import (
    capture,
    cpu_expand_kernel,
    drafter_refit,
    finished_requests,
    history_drafts,
    schedule,
    spec_controller,
)

PATCHES = (
    finished_requests.PATCH,
    schedule.PATCH,
    *capture.PATCHES,
    *spec_controller.PATCHES,
    history_drafts.PATCH,
    *drafter_refit.PATCHES,
    *cpu_expand_kernel.PATCHES,
)
