"""Derive a drafter's configuration from its target's, or read it from its own checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from flashpatch.patches._shared.checkpoint_shapes import shapes
from flashpatch.patches.eagle.errors import eagle_error

UNTRAINED = "Draft with it as it is, with eagle's option cotrain off, or let drafter=new-eagle3 make one."
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

# Entries of a published configuration with which the forward is that of `drafter.Drafter3`.
_FORWARD = {
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "use_aux_norm": False,
    "norm_output": False,
    "use_aux_hidden_state": True,
    "num_hidden_layers": 1,
    "quantization_config": None,
    "logit_scale": 1.0,
}


def kind_of(folder: Path) -> str:
    """Return the kind of a drafter's checkpoint, ``eagle3`` or ``eagle``, which engines call its method."""
    names = json.loads((folder / "config.json").read_text()).get("architectures") or ()
    return "eagle3" if any("Eagle3" in name for name in names) else "eagle"


def drafter_config(target: PretrainedConfig, kind: str = "eagle", own: str | Path = "") -> PretrainedConfig:
    """Make the configuration of a one-layer drafter for a target.

    Args:
        target: configuration of a Llama, Qwen2 or Qwen3 model.
        kind: ``eagle`` (EAGLE-1) or ``eagle3``.
        own: the folder of the drafter, "" for one from scratch. An EAGLE-3 drafter's configuration is that of its
            checkpoint, an EAGLE-1 drafter has the shape of the target's layers.

    Returns:
        A configuration with three entries of FlashPatch's: ``eagle_kind``; ``eagle_head``, ``own`` if the head is the
        drafter's and trained with it, ``target`` if it is the target's; and ``fc_bias``, of EAGLE-1.

    Raises:
        PatchError: another model type, or a drafter that cannot be trained, see `_published`."""
    if target.model_type not in LAYER_TYPES:
        raise eagle_error(
            "drafter",
            f"no drafter can be made for a target of type {target.model_type!r}.",
            f"Targets can be {', '.join(sorted(LAYER_TYPES))}.",
        )
    if own and kind == "eagle3":
        return _published(target, Path(own))
    layer = LAYER_TYPES[target.model_type] if kind == "eagle" else "llama"
    fields: dict[str, Any] = {name: getattr(target, name) for name in _COPIED_FIELDS if hasattr(target, name)}
    fields["head_dim"] = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    fields["num_hidden_layers"] = 1
    if layer == "qwen2":
        config: PretrainedConfig = Qwen2Config(**fields, use_sliding_window=False)
    else:
        bias = target.model_type == "llama" and getattr(target, "attention_bias", False) and kind == "eagle"
        config = LlamaConfig(**fields, attention_bias=bias)
    config.eagle_kind, config.eagle_head = kind, "target"
    config.fc_bias = bool(own) and "fc.bias" in shapes(Path(own))
    config.draft_vocab_size = target.vocab_size
    config.num_aux_hidden_states = 3 if kind == "eagle3" else None  # as engines hand out
    config._attn_implementation = "sdpa"
    return config


def _published(target: PretrainedConfig, folder: Path) -> PretrainedConfig:
    """Read the configuration of an EAGLE-3 drafter from its checkpoint.

    Raises PatchError if it is for another target, or has parts that are not trained here; all of them are named."""
    plain = json.loads((folder / "config.json").read_text())
    plain |= plain.pop("eagle_config", None) or {}
    config = LlamaConfig(**{name: value for name, value in plain.items() if name != "model_type"})
    tensors = shapes(folder)
    size = config.hidden_size
    config.eagle_kind, config.fc_bias = "eagle3", False
    config.eagle_head = plain.get("eagle_head", "own" if "lm_head.weight" in tensors else "target")
    config.draft_vocab_size = plain.get("draft_vocab_size") or config.vocab_size
    config.num_aux_hidden_states = tensors.get("fc.weight", (0, 0))[1] // size
    like = {name: getattr(target, name) for name in ("hidden_size", "vocab_size")}
    wanted = {**_FORWARD, **like, "target_hidden_size": target.hidden_size}
    odd = [
        f"{name}={plain[name]} (not {value})"
        for name, value in wanted.items()
        if plain.get(name) not in (None, value)
    ]
    if config.eagle_head == "target" and config.draft_vocab_size < config.vocab_size:
        odd.append("no tensor lm_head.weight")
    if (config.draft_vocab_size < config.vocab_size) != ("d2t" in tensors):
        odd.append(
            f"draft_vocab_size={config.draft_vocab_size} and {'a' if 'd2t' in tensors else 'no'} tensor d2t"
        )
    if odd:
        raise eagle_error("drafter", f"{folder} cannot be trained: {', '.join(odd)}.", UNTRAINED)
    config._attn_implementation = "sdpa"
    return config
