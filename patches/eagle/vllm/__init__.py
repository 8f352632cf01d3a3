"""Patch vLLM's engine."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.eagle.vllm import capture, cpu_kernels, drafter_refit, history_drafts, scheduler

PATCHES = collected(scheduler, capture, history_drafts, drafter_refit, cpu_kernels)
