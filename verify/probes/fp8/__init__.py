"""Prove by behaviour that the patches of family fp8 are live."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from flashpatch.proof import Proof


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Probe the engine that is installed, vLLM if both are: see ``vllm_probe`` and ``sglang_probe`` beside this."""
    if find_spec("vllm") is None and find_spec("sglang") is not None:
        from flashpatch.verify.probes.fp8 import sglang_probe as engine
    else:
        from flashpatch.verify.probes.fp8 import vllm_probe as engine

    return engine.probe(nonce, workdir)
