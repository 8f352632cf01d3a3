"""verl on a machine without an accelerator: gloo, FSDP on the CPU, vLLM's CPU engine."""

from __future__ import annotations

from flashpatch.patches.cpu import engines, fsdp, gloo, naming, platform, recipe, spawn
from flashpatch.record import Family

FAMILY = Family(
    name="cpu",
    summary="verl, unmodified, on a machine without an accelerator",
    patches=(
        platform.PATCH,
        naming.PATCH,
        recipe.PATCH,
        engines.PATCH,
        gloo.RAY,
        gloo.LAUNCHER,
        fsdp.SYNC,
        fsdp.PIN,
        spawn.WORKERS,
        spawn.SERVERS,
    ),
    too_late=platform.too_late,
    refuses=("verl.utils.config:validate_config",),
)
