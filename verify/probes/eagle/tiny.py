"""Write tiny random Llamas, and drafters for them, as Hugging Face checkpoints.

A *chain* target has layers that add nothing: its next token depends on the last one only, and a drafter that passes the
embedding through (``fc = [I, 0]``, layers that add nothing) drafts exactly its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flashpatch.verify.probes import vllm_engine

ENVIRONMENT = vllm_engine.ENVIRONMENT
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS = 32, 128, 128, 4, 2
_SIZES = dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=HEADS)


def target(directory: Path, seed: int = 0, layers: int = 2, adds: float = 1.0, tied: bool = False) -> Path:
    """Write a Llama. ``adds`` scales what its layers add: with 0 it is a chain. Below 1 its norms are all ones, as
    the drafter has none."""
    _llama(torch.Generator().manual_seed(seed), layers, adds, tied).save_pretrained(directory)
    return directory


def drafter(directory: Path, exact: bool = True, seed: int = 5, engine: str = "vllm") -> Path:
    """Write an EAGLE drafter of one layer for an engine: exact for a chain target, or noise."""
    noise = torch.Generator().manual_seed(seed)
    fc = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    fc = fc if exact else 0.3 * torch.randn(fc.shape, generator=noise)
    model = _llama(noise, 1, 0.0 if exact else 1.0, embeds=False)
    layer = model.model.layers[0].state_dict().items()
    own = {f"layers.0.{name}": one for name, one in layer if "input" not in name}
    if engine == "sglang":
        model.config.architectures, own["fc.bias"] = ["LlamaForCausalLMEagle"], torch.zeros(HIDDEN)
    model.config.save_pretrained(directory)
    save_file({"fc.weight": fc, **own}, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def engine_arguments(model: Path, **more: Any) -> dict[str, Any]:
    """Return keywords of ``vllm.LLM`` and ``vllm.EngineArgs``: small, eager, float32, no tokenizer."""
    return vllm_engine.arguments(model, **{"dtype": "float32", "max_num_seqs": 8, **more})


def drafting(drafter: str | Path, max_drafts: int) -> dict[str, Any]:
    """Return keywords of ``sglang.Engine`` that let a drafter speculate, and on a CPU use kernels that can."""
    speculative = dict(
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=str(drafter),
        speculative_num_steps=max_drafts,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=max_drafts + 1,
    )
    if torch.cuda.is_available():
        return speculative
    parts = ("prefill", "decode", "speculative_draft")
    attention = {f"{part}_attention_backend": "intel_amx" for part in parts}
    return {**speculative, **attention, "device": "cpu", "attention_backend": "torch_native"}


def _llama(noise: torch.Generator, layers: int, adds: float, tied: bool = False, embeds: bool = True) -> Any:
    """Make a Llama of random weights, as a drafter has them if it ``embeds`` nothing: its norms are ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(_SIZES, num_hidden_layers=layers, num_key_value_heads=KV_HEADS, max_position_embeddings=512)
    own = dict(tie_word_embeddings=tied, architectures=["LlamaForCausalLM"])
    model = LlamaForCausalLM(LlamaConfig(**sizes, **own))
    wide = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0.2)
    wide |= dict.fromkeys(("o_proj", "down_proj"), 0.2 * adds)
    if embeds:
        wide |= {"embed_tokens": 0.5, "input_layernorm": 0.08, "lm_head": 0.3}
        wide |= {"norm": 0.08} if adds == 1 else {}
    with torch.no_grad():
        for name, one in model.named_parameters():
            if (kind := name.split(".")[-2]) in wide:
                one.copy_(wide[kind] * torch.randn(one.shape, generator=noise) + ("norm" in kind))
    return model
