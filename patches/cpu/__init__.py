"""verl on a machine without an accelerator: gloo, FSDP on the CPU, vLLM's CPU engine."""

from __future__ import annotations

from pathlib import Path

from flashpatch.patches.cpu import engines, fsdp, gloo, naming, platform, recipe
from flashpatch.proof import Proof
from flashpatch.record import Family


def _probe(nonce: str, workdir: Path) -> list[Proof]:
    from flashpatch.patches.cpu.probe import probe

    return probe(nonce, workdir)


FAMILY = Family(
    name="cpu",
    summary="verl, unmodified, on a machine without an accelerator",
    patches=(
        platform.PATCH,
        naming.PATCH,
        recipe.PATCH,
        recipe.RUN,
        engines.PATCH,
        gloo.RAY,
        gloo.LAUNCHER,
        fsdp.SYNC,
        fsdp.PIN,
        fsdp.OFFLOAD,
    ),
    too_late=platform.too_late,
    probe=_probe,
    refuses=("verl.utils.config:validate_config",),
)
