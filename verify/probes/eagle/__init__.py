"""Prove by behaviour that the patches of family eagle are live."""

from __future__ import annotations

from pathlib import Path

from flashpatch.proof import Proof


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the family's probe: see `flashpatch.verify.probes.eagle.engine_probe`."""
    from flashpatch.verify.probes.eagle import engine_probe

    return engine_probe.probe(nonce, workdir)
