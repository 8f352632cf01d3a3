"""Make tiny targets, and the samples that a capture of them would give."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from machine import limit
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from flashpatch.patches.eagle.capture.sample import Sample
from flashpatch.patches.eagle.capture.sample_queue import SampleWriter
from flashpatch.patches.eagle.train.pack import windows
from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_target(family: str = "llama", seed: int = 0, markov: bool = False, **shape) -> torch.nn.Module:
    """Make a random target. A ``markov`` one's state is the last token's embedding, of unit root mean square."""
    config, model = FAMILIES[family]
    torch.manual_seed(seed)
    made = model(config(**{**SHAPE, "initializer_range": 0.3, **shape})).eval()
    if markov:
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    parameter.zero_()
            table = made.model.embed_tokens.weight
            table /= table.pow(2).mean(-1, keepdim=True).sqrt()
            made.model.norm.variance_epsilon = 0.0
    return made


def save_target(folder: Path, family: str = "llama", markov: bool = True) -> Path:
    """Write a target; return its folder."""
    make_target(family, markov=markov).save_pretrained(folder)
    return folder


def publish(folder: Path, config, vocabulary: int | None = None, layer: str = "midlayer", **entries) -> Path:
    """Write a random EAGLE-3 drafter for a target's configuration, with the names and the entries of published ones.

    It drafts ``vocabulary`` tokens, half of them the target's first, which a tokenizer of bytes has for text; all if not said."""
    noise = torch.Generator().manual_seed(3)
    size, inner, heads = config.hidden_size, 96, config.num_attention_heads
    drafted = vocabulary or config.vocab_size

    def matrix(*shape: int) -> torch.Tensor:
        return 0.05 * torch.randn(shape, generator=noise)

    tensors = {"fc.weight": matrix(size, 3 * size), "norm.weight": torch.ones(size)}
    tensors["lm_head.weight"] = matrix(drafted, size)
    attention = {"q_proj": (size, 2 * size), "k_proj": (size, 2 * size), "v_proj": (size, 2 * size)}
    for name, shape in {**attention, "o_proj": (size, size)}.items():
        tensors[f"{layer}.self_attn.{name}.weight"] = matrix(*shape)
    for name, shape in {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}.items():
        tensors[f"{layer}.mlp.{name}_proj.weight"] = matrix(*shape)
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}.{name}.weight"] = torch.ones(size)
    if vocabulary:
        others = drafted // 2 + torch.randperm(config.vocab_size - drafted // 2, generator=noise)
        ids = torch.cat([torch.arange(drafted // 2), others])[:drafted].sort().values
        tensors["d2t"] = ids - torch.arange(drafted)
        tensors["t2d"] = torch.isin(torch.arange(config.vocab_size), ids)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    plain |= {"hidden_size": size, "intermediate_size": inner, "num_attention_heads": heads}
    plain |= {"num_key_value_heads": heads, "head_dim": size // heads, "hidden_act": "silu"}
    plain |= {"vocab_size": config.vocab_size, "draft_vocab_size": drafted, "rms_norm_eps": 1e-5}
    plain |= {
        "rope_theta": 500000.0,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
    }
    plain |= {"torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps({**plain, **entries}))
    return folder


@torch.no_grad()
def capture(target: torch.nn.Module, prompts: int, length: int = 24, seed: int = 0, version: int = 1):
    """Return greedy continuations of random prompts with their states; the last token's is not known."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number in range(prompts):
        prompt = torch.randint(0, target.config.vocab_size, (1, 4), generator=generator)
        ids = prompt
        for _ in range(length):
            ids = torch.cat((ids, target(ids).logits[:, -1:].argmax(-1)), dim=1)
        out = target.model(ids[:, :-1], output_hidden_states=True)
        hidden = torch.cat((out.last_hidden_state[0], torch.zeros(1, target.config.hidden_size)))
        layers = torch.cat(out.hidden_states[:3], dim=-1)[0]
        known = torch.arange(ids.shape[1]) < ids.shape[1] - 1
        samples.append(
            Sample(
                request=f"r{number}",
                input_ids=ids[0],
                hidden=hidden,
                known=known,
                response=torch.arange(ids.shape[1]) >= prompt.shape[1],
                version=version,
                auxiliary=torch.cat((layers, torch.zeros(1, layers.shape[1]))),
            )
        )
    return samples


def random_samples(lengths: Iterable[int], seed: int) -> list[Sample]:
    """Return requests of random tokens and states for `SHAPE`, of which a fifth of the states was not captured."""
    noise, found = torch.Generator().manual_seed(seed), []
    for length in lengths:
        known = torch.rand(length, generator=noise) < 0.8
        found.append(
            Sample(
                request="r",
                input_ids=torch.randint(0, 64, (length,), generator=noise),
                hidden=torch.randn(length, 32, generator=noise) * known[:, None],
                known=known,
                response=torch.arange(length) >= length // 4,
                version=1,
                auxiliary=torch.randn(length, 96, generator=noise) * known[:, None],
            )
        )
    return found


def embeddings_of(target: torch.nn.Module) -> TargetEmbeddings:
    """Return what a drafter has from its target."""
    return TargetEmbeddings(target.model.embed_tokens.weight, target.lm_head.weight)


def cut(samples: list[Sample], longest: int = 512, **how) -> list:
    """Return all windows of some samples."""
    return [part for sample in samples for part in windows(sample, longest, **how)]


def fill(queue: Path, samples: list[Sample]) -> None:
    """Put samples into a trainer's queue, and wait until they are written."""
    writer = SampleWriter(queue, waiting=len(samples))
    for sample in samples:
        assert writer.offer(sample)
    writer.close(limit(60))
