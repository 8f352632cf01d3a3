"""Prove by behaviour that the patches of family cpu are live."""

from __future__ import annotations

from pathlib import Path

from flashpatch.proof import Proof


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the family's probe: see `flashpatch.verify.probes.cpu.verl_probe`."""
    from flashpatch.verify.probes.cpu import verl_probe

    return verl_probe.probe(nonce, workdir)
