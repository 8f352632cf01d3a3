"""Pair modules of an engine's model with those of the Hugging Face model."""

from __future__ import annotations

import re
from collections.abc import Collection

#: Modules that hold others and give back the stream in parts, take other arguments than their namesakes, or have their
#: columns in another order (BLOOM's, head by head).
_OTHERWISE = re.compile(r"(^|\.)(model|layers\.\d+|experts|act_fn|rotary_emb|query_key_value)$")
#: A mixer of vLLM's in a wrapper of the same name, which scales what it is given (Falcon-H1); Hugging Face's does that itself.
_WRAPPED = re.compile(r"(?<=\.mamba)\.mamba(?=\.)")
#: Modules of vLLM and SGLang that compute several of Hugging Face's at once.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def counterparts(name: str, known: Collection[str], called: Collection[str]) -> tuple[str, ...]:
    """Return the names of the modules that compute together what the engine's module ``name`` does; () if there are none.

    Args:
        name: of a module of the engine's model.
        known: names of all modules of the Hugging Face model.
        called: names of all modules of the engine's model.
    """
    if _OTHERWISE.search(name) or _within(name) in called:
        return ()
    name = unwrapped(name)
    if name in known:
        return (name,)
    parent, _, last = name.rpartition(".")
    parts = tuple(f"{parent}.{part}" for part in FUSED.get(last, ()))
    return parts if parts and set(parts) <= set(known) else ()


def unwrapped(name: str) -> str:
    """Return the name of a place without the wrapper that the engine has around it."""
    return _WRAPPED.sub("", name)


def _within(name: str) -> str:
    """The module that ``name`` would wrap."""
    return f"{name}.{name.rpartition('.')[2]}"
