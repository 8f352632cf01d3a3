"""The family on vLLM's engine."""

from __future__ import annotations

from flashpatch.patches.eagle.vllm import capture, ending

PATCHES = (ending.FREE, ending.SCHEDULE, *capture.PATCHES)
