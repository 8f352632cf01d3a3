"""Patch SGLang's engine."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.eagle.sglang import capture, commands, drafter_refit, history_drafts, spec_arms

PATCHES = collected(capture, spec_arms, drafter_refit, history_drafts, commands)
