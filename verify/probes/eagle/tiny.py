"""Write tiny random Llamas, and drafters for them, as Hugging Face checkpoints.

A *chain* target has layers that add nothing: its next token depends on the last one only, and a drafter that passes the
embedding through (``fc = [I, 0]``, layers that add nothing) drafts exactly its tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flashpatch.verify.probes import sglang_engine, vllm_engine

ENVIRONMENT = vllm_engine.ENVIRONMENT
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS = 32, 128, 128, 4, 2
_SIZES = dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=HEADS)


def target(directory: Path, seed: int = 0, layers: int = 2, adds: float = 1.0, tied: bool = False) -> Path:
    """Write a Llama. ``adds`` scales what its layers add: with 0 it is a chain. Below 1 its norms are all ones, as
    the drafter has none."""
    noise = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": random(noise, VOCAB, HIDDEN, wide=0.5)}
    for number in range(layers):
        tensors |= layer(f"model.layers.{number}.", noise, adds)
        tensors[f"model.layers.{number}.input_layernorm.weight"] = 1 + random(noise, HIDDEN)
    tensors["model.norm.weight"] = 1 + random(noise, HIDDEN) if adds == 1 else torch.ones(HIDDEN)
    if not tied:
        tensors["lm_head.weight"] = random(noise, VOCAB, HIDDEN, wide=0.3)
    return write(directory, tensors, "LlamaForCausalLM", layers, tie_word_embeddings=tied)


def drafter(directory: Path, exact: bool = True, seed: int = 5, engine: str = "vllm") -> Path:
    """Write an EAGLE drafter of one layer for an engine: exact for a chain target, or noise."""
    noise = torch.Generator().manual_seed(seed)
    if exact:
        fc = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    else:
        fc = random(noise, HIDDEN, 2 * HIDDEN, wide=0.3)
    tensors = {"fc.weight": fc, **layer("layers.0.", noise, 0.0 if exact else 1.0)}
    if engine != "sglang":
        return write(directory, tensors, "LlamaForCausalLM", 1)
    return write(directory, {**tensors, "fc.bias": torch.zeros(HIDDEN)}, "LlamaForCausalLMEagle", 1)


def engine_arguments(model: Path, **more: Any) -> dict[str, Any]:
    """Return keywords of ``vllm.LLM`` and ``vllm.EngineArgs``: small, eager, float32, no tokenizer."""
    return vllm_engine.arguments(model, **{"dtype": "float32", "max_num_seqs": 8, **more})


def sglang_arguments(model: Path, drafter: Path, max_drafts: int, **more: Any) -> dict[str, Any]:
    """Return keywords of ``sglang.Engine``: small, eager, float32, no tokenizer, chains of ``max_drafts`` drafts."""
    own = {"dtype": "float32", **drafting(drafter, max_drafts)}
    return sglang_engine.arguments(model, **{**own, **more})


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


def random(noise: torch.Generator, *shape: int, wide: float = 0.08) -> torch.Tensor:
    return wide * torch.randn(shape, generator=noise)


def layer(at: str, noise: torch.Generator, weight: float, inputs: int = 0) -> dict[str, torch.Tensor]:
    """Make the linear layers and the second norm of a decoder layer; ``weight`` scales what it adds. Its attention
    reads ``inputs`` values, `HIDDEN` if not said."""
    inputs, kv = inputs or HIDDEN, HIDDEN // HEADS * KV_HEADS
    return {
        f"{at}self_attn.q_proj.weight": random(noise, HIDDEN, inputs, wide=0.2),
        f"{at}self_attn.k_proj.weight": random(noise, kv, inputs, wide=0.2),
        f"{at}self_attn.v_proj.weight": random(noise, kv, inputs, wide=0.2),
        f"{at}self_attn.o_proj.weight": weight * random(noise, HIDDEN, HIDDEN, wide=0.2),
        f"{at}mlp.gate_proj.weight": random(noise, INNER, HIDDEN, wide=0.2),
        f"{at}mlp.up_proj.weight": random(noise, INNER, HIDDEN, wide=0.2),
        f"{at}mlp.down_proj.weight": weight * random(noise, HIDDEN, INNER, wide=0.2),
        f"{at}post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def write(
    directory: Path, tensors: dict[str, torch.Tensor], architecture: str, layers: int, **more: Any
) -> Path:
    """Write a checkpoint; ``more`` are further entries of its configuration."""
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = dict(
        **_SIZES,
        architectures=[architecture],
        model_type="llama",
        num_hidden_layers=layers,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        **dict(tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, torch_dtype="float32"),
    )
    (directory / "config.json").write_text(json.dumps({**config, **more}))
    return directory
