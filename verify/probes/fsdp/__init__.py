"""Prove by behaviour that the patches of family fsdp are live."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from flashpatch.proof import Proof


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the family's probe of verl with the engine that is here: see ``verl_probe`` and ``verl_sglang_probe``."""
    if find_spec("vllm") is None and find_spec("sglang") is not None:
        from flashpatch.verify.probes.fsdp import verl_sglang_probe

        return list(verl_sglang_probe.probe(workdir))
    from flashpatch.verify.probes.fsdp import verl_probe

    return verl_probe.probe(nonce, workdir)
