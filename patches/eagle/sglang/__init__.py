"""Patch SGLang's engine."""

from __future__ import annotations

from flashpatch.patches.eagle.sglang import capture, commands, drafter_refit, spec_arms

PATCHES = (*capture.PATCHES, *spec_arms.PATCHES, *drafter_refit.PATCHES, commands.PATCH)
