"""Write tiny random Llamas, and drafters for them, as Hugging Face checkpoints.

A *chain* target has layers that add nothing: its next token depends on the last one only, and a drafter that
passes the embedding through (``fc = [I, 0]``, layers that add nothing) drafts exactly its tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flashpatch.verify.probes.fp8 import sglang_job
from flashpatch.verify.probes.fp8 import tiny as fp8_tiny
from flashpatch.verify.probes.fp8.tiny import ENVIRONMENT as ENVIRONMENT

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS = 32, 128, 128, 4, 2


def target(directory: Path, seed: int = 0, layers: int = 2, adds: float = 1.0, tied: bool = False) -> Path:
    """Write a Llama. ``adds`` scales what its layers add: with 0 it is a chain. Below 1 its norms are all ones, as
    the drafter has none."""
    noise = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": _random(noise, VOCAB, HIDDEN, wide=0.5)}
    for layer in range(layers):
        tensors |= _layer(f"model.layers.{layer}.", noise, adds)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = 1 + _random(noise, HIDDEN)
    tensors["model.norm.weight"] = 1 + _random(noise, HIDDEN) if adds == 1 else torch.ones(HIDDEN)
    if not tied:
        tensors["lm_head.weight"] = _random(noise, VOCAB, HIDDEN, wide=0.3)
    return _write(directory, tensors, "LlamaForCausalLM", layers, tie_word_embeddings=tied)


def noisy(directory: Path, original: Path, share: float = 0.02, seed: int = 9) -> Path:
    """Write a copy of a checkpoint with noise, which as a draft model is sometimes right."""
    noise = torch.Generator().manual_seed(seed)
    tensors = load_file(original / "model.safetensors")
    tensors = {
        name: tensor + share * _random(noise, *tensor.shape, wide=1.0) for name, tensor in tensors.items()
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text((original / "config.json").read_text())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def drafter(directory: Path, exact: bool = True, seed: int = 5, engine: str = "vllm") -> Path:
    """Write an EAGLE drafter of one layer for an engine: exact for a chain target, or noise."""
    noise = torch.Generator().manual_seed(seed)
    if exact:
        fc = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    else:
        fc = _random(noise, HIDDEN, 2 * HIDDEN, wide=0.3)
    tensors = {"fc.weight": fc, **_layer("layers.0.", noise, 0.0 if exact else 1.0)}
    if engine == "sglang":
        tensors["fc.bias"] = torch.zeros(HIDDEN)
        return _write(directory, tensors, "LlamaForCausalLMEagle", 1)
    return _write(directory, tensors, "LlamaForCausalLM", 1)


def drafter3(directory: Path, seed: int = 5) -> Path:
    """Write an EAGLE-3 drafter of noise."""
    noise = torch.Generator().manual_seed(seed)
    tensors = {
        "fc.weight": _random(noise, HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _random(noise, VOCAB, HIDDEN),
        **_layer("midlayer.", noise, 1.0, inputs=2 * HIDDEN),
    }
    return _write(directory, tensors, "LlamaForCausalLMEagle3", 1, draft_vocab_size=VOCAB)


def engine_arguments(model: Path, **more: Any) -> dict[str, Any]:
    """Return keywords of ``vllm.LLM`` and ``vllm.EngineArgs``: small, eager, float32, no tokenizer."""
    own = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 16 << 20}
    return {**fp8_tiny.engine_arguments(str(model)), **own, **more}


def sglang_arguments(model: Path, drafter: Path, max_drafts: int, **more: Any) -> dict[str, Any]:
    """Return keywords of ``sglang.Engine``: small, eager, float32, no tokenizer, chains of ``max_drafts`` drafts."""
    amx = "intel_amx"
    on_cpu = dict(
        device="cpu",
        attention_backend="torch_native",
        prefill_attention_backend=amx,
        decode_attention_backend=amx,
        speculative_draft_attention_backend=amx,
    )
    return {
        **sglang_job.engine_arguments(str(model)),
        **dict(
            dtype="float32",
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=str(drafter),
            speculative_num_steps=max_drafts,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=max_drafts + 1,
        ),
        **({} if torch.cuda.is_available() else on_cpu),
        **more,
    }


def _random(noise: torch.Generator, *shape: int, wide: float = 0.08) -> torch.Tensor:
    return wide * torch.randn(shape, generator=noise)


def _layer(at: str, noise: torch.Generator, weight: float, inputs: int = 0) -> dict[str, torch.Tensor]:
    """Make the linear layers and the second norm of a decoder layer; ``weight`` scales what it adds. Its attention
    reads ``inputs`` values, `HIDDEN` if not said."""
    inputs, kv = inputs or HIDDEN, HIDDEN // HEADS * KV_HEADS
    return {
        f"{at}self_attn.q_proj.weight": _random(noise, HIDDEN, inputs, wide=0.2),
        f"{at}self_attn.k_proj.weight": _random(noise, kv, inputs, wide=0.2),
        f"{at}self_attn.v_proj.weight": _random(noise, kv, inputs, wide=0.2),
        f"{at}self_attn.o_proj.weight": weight * _random(noise, HIDDEN, HIDDEN, wide=0.2),
        f"{at}mlp.gate_proj.weight": _random(noise, INNER, HIDDEN, wide=0.2),
        f"{at}mlp.up_proj.weight": _random(noise, INNER, HIDDEN, wide=0.2),
        f"{at}mlp.down_proj.weight": weight * _random(noise, HIDDEN, INNER, wide=0.2),
        f"{at}post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def _write(
    directory: Path, tensors: dict[str, torch.Tensor], architecture: str, layers: int, **more: Any
) -> Path:
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = dict(
        architectures=[architecture],
        model_type="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="float32",
    )
    (directory / "config.json").write_text(json.dumps({**config, **more}))
    return directory
