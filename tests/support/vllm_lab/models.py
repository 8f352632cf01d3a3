"""Tiny random Hugging Face checkpoints, made on the spot and the same for the same (family, seed, overrides).

Two layers, hidden size 256, vocabulary 256. Every tensor is random, biases and norms too, and wide enough
(std 0.08) that two seeds give clearly different answers: a weight that was not updated cannot hide."""

import contextlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_lab.families import EXPERTS, GROUPED, LOCAL, MORE, of

VOCAB = 256
MAX_LENGTH = 512

_SMALL: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_LENGTH,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
    tie_word_embeddings=False,
)

_MAMBA = dict(mamba_n_heads=8, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=64, mamba_expand=2)
# Scores and logits, here as low as random weights take them.
_CAPPED = dict(attn_logit_softcapping=0.5, final_logit_softcapping=1.0)
_SHARED = dict(n_shared_experts=1, first_k_dense_replace=1)
_GEMMA = dict(head_dim=64, query_pre_attn_scalar=64, tie_word_embeddings=True, sliding_window=64)

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2": of("qwen2"),  # biases on q, k, v
    "qwen2-tied": of("qwen2", tie_word_embeddings=True),
    "llama": of("llama"),
    "llama-tied": of("llama", tie_word_embeddings=True),
    "llama-biased": of("llama", attention_bias=True, mlp_bias=True),
    "qwen3": of("qwen3", head_dim=64),  # norms on q and k
    "qwen3-moe": of("qwen3_moe", head_dim=64, decoder_sparse_step=1, norm_topk_prob=True, **EXPERTS),
    "mixtral": of("mixtral", intermediate_size=128, sliding_window=None, **LOCAL),  # experts named w1, w2, w3
    "bloom": of("bloom", num_key_value_heads=4, tie_word_embeddings=True),  # ALiBi in place of positions
    "gemma3": of("gemma3_text", **_GEMMA),  # norms scale by 1 + w
    # Published ones have this activation too, and SGLang reads it.
    "gemma2": of("gemma2", hidden_act="gelu_pytorch_tanh", **_CAPPED, **_GEMMA),
    # The router's correction bias is one parameter of two modules.
    "glm4-moe": of("glm4_moe", head_dim=64, attention_bias=True, use_qk_norm=True, **_SHARED, **GROUPED),
    "deepseek-v2": of(
        "deepseek_v2",
        first_k_dense_replace=2,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        **GROUPED,
    ),
    "phi3": of("phi3"),  # q, k, v and gate, up are already fused in the checkpoint
    "olmoe": of("olmoe", num_experts=4, num_experts_per_tok=2, intermediate_size=128),
    # Attention sinks, biases of experts.
    "gpt-oss": of("gpt_oss", head_dim=64, intermediate_size=256, sliding_window=64, **LOCAL),
    "deepseek-v3": of(
        "deepseek_v3",
        kv_lora_rank=512,  # with 64 rotary dimensions, what vLLM's MLA takes on a CPU
        q_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        num_key_value_heads=4,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        num_nextn_predict_layers=0,
        **_SHARED,
        **GROUPED,
    ),
    "qwen3-next": of(
        "qwen3_next",
        head_dim=64,
        shared_expert_intermediate_size=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=["linear_attention", "full_attention"],
        **EXPERTS,
    ),
    "mamba2": of("mamba2", num_heads=8, head_dim=64, state_size=64, n_groups=2, expand=2),
    "falcon-h1": of("falcon_h1", head_dim=64, mamba_d_ssm=512, **_MAMBA),
    "granite-moe-hybrid": of(
        "granitemoehybrid",
        layer_types=["mamba", "attention"],
        intermediate_size=128,
        shared_intermediate_size=128,
        **LOCAL,
        **_MAMBA,
    ),
    "nemotron-h": of(
        "nemotron_h",
        hybrid_override_pattern="M*-",
        num_hidden_layers=3,
        head_dim=64,
        mamba_num_heads=8,
        mamba_head_dim=64,
        n_groups=1,
        ssm_state_size=64,
    ),
}


def checkpoint(root: str | os.PathLike[str], family: str, seed: int = 0, **overrides: Any) -> Path:
    """The directory under `root` of this model; made when it is not there. `overrides` change its config."""
    suffix = f"-{zlib.crc32(json.dumps(overrides, sort_keys=True).encode()):08x}" if overrides else ""
    with making(Path(root) / f"{family}-{seed}{suffix}") as (target, work):
        if work is not None:
            _write(work, family, seed, overrides)
    return target


def weights(directory: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Every (name, tensor) of a checkpoint, in file order, one in memory at a time."""
    from safetensors import safe_open

    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)


def write_changed(work: Path, source: Path, tensors: Mapping[str, Any]) -> None:
    """Write a checkpoint like ``source`` with these tensors into a directory."""
    from safetensors.torch import save_file

    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (work / file.name).write_bytes(file.read_bytes())
    save_file(dict(tensors), work / "model.safetensors", metadata={"format": "pt"})


@contextlib.contextmanager
def making(target: Path) -> Iterator[tuple[Path, Path | None]]:
    """(target, a scratch directory that becomes it on success), or (target, None) when it exists already."""
    if target.exists():
        yield target, None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield target, work
        with contextlib.suppress(OSError):  # another process made the same meanwhile
            work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(directory: Path, family: str, seed: int, overrides: Mapping[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, extra = {**FAMILIES, **MORE}[family]
    config = AutoConfig.for_model(model_type, **{**_SMALL, **extra, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, parameter.shape, seed, gemma=model_type.startswith("gemma")))
        for name, buffer in model.named_buffers():
            if name.endswith(("bias", "scalar")):
                buffer.copy_(_values(name, buffer.shape, seed, gemma=False))
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)


def _values(name: str, shape: Any, seed: int, gemma: bool) -> Any:
    import torch

    noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode())))
    if name.endswith("scalar"):
        return 1 + 0.2 * noise
    if "norm" in name:
        return 0.2 * noise if gemma else 1 + 0.2 * noise
    if gemma and "embed" in name:
        return 0.02 * noise  # Gemma multiplies it by 16: at 0.08 every token would predict itself
    return (0.1 if name.endswith("bias") else 0.08) * noise


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"t{index}" for index in range(VOCAB - 3))]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
