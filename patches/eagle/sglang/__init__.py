"""Patch SGLang's engine."""

from __future__ import annotations

from flashpatch.patches.eagle.sglang import capture, commands, drafter_refit, history_drafts, spec_arms

PATCHES = (
    *capture.PATCHES,
    *spec_arms.PATCHES,
    *drafter_refit.PATCHES,
    *history_drafts.PATCHES,
    commands.PATCH,
)
