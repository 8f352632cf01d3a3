"""Prove by behaviour that the patches of family flowrl are live."""

from __future__ import annotations

from pathlib import Path

from flashpatch.proof import Proof


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the family's probe: see `flashpatch.verify.probes.flowrl.verl_probe`."""
    from flashpatch.verify.probes.flowrl import verl_probe

    return verl_probe.probe(nonce, workdir)
