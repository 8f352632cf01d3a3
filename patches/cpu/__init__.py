"""Run verl on a machine without an accelerator: gloo, FSDP on the CPU, vLLM's or SGLang's CPU engine."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.cpu import platform, sglang_tensors, trainer, ulysses, verl_config
from flashpatch.record import Family

FAMILY = Family(
    name="cpu",
    summary="verl, unmodified, on a machine without an accelerator",
    patches=collected(platform, verl_config, trainer, sglang_tensors, ulysses),
    too_late=platform.too_late,
    refuses=("verl.utils.config:validate_config",),
)
