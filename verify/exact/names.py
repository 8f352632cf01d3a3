"""Pair modules of an engine's model with those of the Hugging Face model."""

from __future__ import annotations

import re

#: Modules that hold others and give back the stream in parts, or take other arguments than their namesakes.
_OTHERWISE = re.compile(r"(^|\.)(model|layers\.\d+|experts|act_fn|rotary_emb)$")
#: Modules of vLLM and SGLang that compute several of Hugging Face's at once.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def counterparts(name: str, known: frozenset[str] | set[str]) -> tuple[str, ...]:
    """Return the names of the modules that compute together what the engine's module ``name`` does; () if there are none.

    Args:
        name: of a module of the engine's model.
        known: names of all modules of the Hugging Face model.
    """
    if _OTHERWISE.search(name):
        return ()
    if name in known:
        return (name,)
    parent, _, last = name.rpartition(".")
    parts = tuple(f"{parent}.{part}" for part in FUSED.get(last, ()))
    return parts if parts and known.issuperset(parts) else ()
