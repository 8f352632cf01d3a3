"""Pair modules of an engine's model with those of the Hugging Face model."""

from __future__ import annotations

import re
from collections.abc import Collection

#: Modules that hold others and give back the stream in parts, take other arguments than their namesakes, have their
#: columns in another order (BLOOM's, head by head), or apply their gate themselves (Qwen's shared expert).
_OTHERWISE = re.compile(r"(^|\.)(model|layers\.\d+|experts|shared_expert|act_fn|rotary_emb|query_key_value)$")
#: A mixer of vLLM's in a wrapper of the same name, which scales what it is given (Falcon-H1); Hugging Face's does that itself.
_WRAPPED = re.compile(r"(?<=\.mamba)\.mamba(?=\.)")
#: Modules of vLLM and SGLang that compute several of Hugging Face's at once.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: Names that engines kept and transformers changed: of a block of experts, and of the router in it.
_RENAMED = ((re.compile(r"\.block_sparse_moe\b"), ".mlp"), (re.compile(r"\.gate$"), ".router"))


def counterparts(name: str, known: Collection[str], called: Collection[str]) -> tuple[str, ...]:
    """Return the names of the modules that compute together what the engine's module ``name`` does; () if there are none.

    Args:
        name: of a module of the engine's model.
        known: names of all modules of the Hugging Face model.
        called: names of all modules of the engine's model.
    """
    if _OTHERWISE.search(name) or _within(name) in called:
        return ()
    for one in spellings(name):
        if one in known:
            return (one,)
        parent, _, last = one.rpartition(".")
        parts = tuple(f"{parent}.{part}" for part in FUSED.get(last, ()))
        if parts and set(parts) <= set(known):
            return parts
    return ()


def spellings(name: str) -> list[str]:
    """Return the names that a place of the engine may have in the Hugging Face model."""
    found = [_WRAPPED.sub("", name)]
    for pattern, other in _RENAMED:
        found += [pattern.sub(other, one) for one in found if pattern.search(one)]
    return found


def _within(name: str) -> str:
    """The module that ``name`` would wrap."""
    return f"{name}.{name.rpartition('.')[2]}"
