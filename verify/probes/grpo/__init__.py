"""Prove by behaviour that the patches of family grpo are live."""

from __future__ import annotations

from pathlib import Path

from flashpatch.proof import Proof


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the family's probe: see `flashpatch.verify.probes.grpo.verl_probe`."""
    from flashpatch.verify.probes.grpo import verl_probe

    return verl_probe.probe(nonce, workdir)
