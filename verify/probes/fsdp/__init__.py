"""Prove by behaviour that the patches of family fsdp are live."""

from __future__ import annotations

from pathlib import Path

from flashpatch.proof import Proof


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the family's probe: see `flashpatch.verify.probes.fsdp.verl_probe`."""
    from flashpatch.verify.probes.fsdp import verl_probe

    return verl_probe.probe(nonce, workdir)
