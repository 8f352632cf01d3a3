"""Random Qwen2 and Qwen3-MoE checkpoints of realistic proportions: bf16 safetensors and a config, no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FILE = "model.safetensors"
_PART = "model.layers."


@dataclass(frozen=True)
class Size:
    """Qwen2, with ``experts`` Qwen3-MoE, embeddings untied: where they are tied, vLLM's own reload skips work."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    experts: int = 0

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions that vLLM has on a CPU: experts only in bf16."""
        return ("bf16",) if self.experts else ("bf16", "fp8")

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor in the model's own order, in which trainers send them."""
        kv = self.hidden // self.heads * self.kv_heads
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            at = f"{_PART}{layer}."
            for key, rows in (("q", self.hidden), ("k", kv), ("v", kv)):
                yield f"{at}self_attn.{key}_proj.weight", (rows, self.hidden)
                if self.experts:
                    if key != "v":
                        yield f"{at}self_attn.{key}_norm.weight", (self.hidden // self.heads,)
                else:
                    yield f"{at}self_attn.{key}_proj.bias", (rows,)
            yield f"{at}self_attn.o_proj.weight", (self.hidden, self.hidden)
            if self.experts:
                yield f"{at}mlp.gate.weight", (self.experts, self.hidden)
            for part in [f"mlp.experts.{i}" for i in range(self.experts)] or ["mlp"]:
                yield f"{at}{part}.gate_proj.weight", (self.intermediate, self.hidden)
                yield f"{at}{part}.up_proj.weight", (self.intermediate, self.hidden)
                yield f"{at}{part}.down_proj.weight", (self.hidden, self.intermediate)
            yield f"{at}input_layernorm.weight", (self.hidden,)
            yield f"{at}post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocab, self.hidden)

    @property
    def parameters(self) -> int:
        total = 0
        for _, shape in self.shapes():
            count = 1
            for edge in shape:
                count *= edge
            total += count
        return total


SIZES = (
    Size("50M", hidden=512, intermediate=1536, layers=11, heads=8, kv_heads=2, vocab=16384),
    Size("350M", hidden=1024, intermediate=2816, layers=22, heads=16, kv_heads=4, vocab=49152),
    Size("1B", hidden=2048, intermediate=5632, layers=20, heads=32, kv_heads=8, vocab=32768),
    Size("moe", hidden=256, intermediate=128, layers=4, heads=8, kv_heads=2, vocab=8192, experts=128),
)


def write(size: Size, folder: Path) -> None:
    """Make the checkpoint in ``folder``, wide enough (std 0.08) that another policy answers differently."""
    import torch
    from safetensors.torch import save_file

    configure(size, folder)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in size.shapes():
        tensor = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.08, generator=generator)
        tensors[name] = tensor.add_(1) if "norm" in name else tensor
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def configure(size: Size, folder: Path) -> None:
    """Write the configuration alone, for an engine that draws its weights itself."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": size.vocab,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    if size.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": size.hidden // size.heads,
            "mlp_only_layers": [],
            "moe_intermediate_size": size.intermediate,
            "norm_topk_prob": True,
            "num_experts": size.experts,
            "num_experts_per_tok": 8,
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


class Policies:
    """Two policies out of one checkpoint: as it is, and with the order of its layers reversed.

    The file is mapped, so several processes share its memory; `resident` brings all of it in."""

    def __init__(self, size: Size, folder: Path) -> None:
        from safetensors.torch import load_file

        tensors = load_file(folder / FILE)
        self.straight = [(name, tensors[name]) for name, _ in size.shapes()]
        self.reversed = [(name, tensors[_mirror(name, size.layers)]) for name, _ in size.shapes()]

    def resident(self) -> None:
        """Read one byte of each page."""
        import torch

        for _, tensor in self.straight:
            tensor.view(torch.uint8).flatten()[::4096].sum()


def buckets(policy: list[tuple[str, torch.Tensor]], limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Cut between tensors, wherever ``limit`` bytes are full; a larger tensor is a bucket of its own."""
    bucket, held = [], 0
    for name, tensor in policy:
        if bucket and held + tensor.nbytes > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    yield bucket


def _mirror(name: str, layers: int) -> str:
    if not name.startswith(_PART):
        return name
    number, _, rest = name.removeprefix(_PART).partition(".")
    return f"{_PART}{layers - 1 - int(number)}.{rest}"
