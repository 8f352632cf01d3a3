"""Derive a drafter's configuration from its target's."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from flashpatch.patches.eagle.errors import eagle_error

# Qwen3 has per-head norms that no engine's EAGLE-1 loader knows; its drafters use the Llama layer.
LAYER_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "llama"}

_COPIED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
)


def drafter_config(target: PretrainedConfig, kind: str = "eagle", auxiliary: int = 3) -> PretrainedConfig:
    """Make the configuration of a one-layer drafter for a target.

    Args:
        target: configuration of a Llama, Qwen2 or Qwen3 model.
        kind: ``eagle`` (EAGLE-1) or ``eagle3``.
        auxiliary: layers of the target that an EAGLE-3 drafter reads.

    Raises:
        PatchError: another model type or kind."""
    if target.model_type not in LAYER_TYPES:
        raise eagle_error(
            "drafter",
            f"no drafter can be made for a target of type {target.model_type!r}.",
            f"Targets can be {', '.join(sorted(LAYER_TYPES))}.",
        )
    if kind not in ("eagle", "eagle3"):
        raise eagle_error(
            "drafter", f"a drafter is of kind eagle or eagle3, not {kind!r}.", "Choose one of the two."
        )
    layer = LAYER_TYPES[target.model_type] if kind == "eagle" else "llama"
    fields: dict[str, Any] = {name: getattr(target, name) for name in _COPIED_FIELDS if hasattr(target, name)}
    fields["head_dim"] = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    fields["num_hidden_layers"] = 1
    if layer == "qwen2":
        config: PretrainedConfig = Qwen2Config(**fields, use_sliding_window=False)
    else:
        bias = target.model_type == "llama" and getattr(target, "attention_bias", False) and kind == "eagle"
        config = LlamaConfig(**fields, attention_bias=bias)
    config.eagle_kind = kind
    config.num_aux_hidden_states = auxiliary if kind == "eagle3" else None
    config._attn_implementation = "sdpa"
    return config
