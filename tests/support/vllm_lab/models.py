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

from vllm_lab.families import FAMILIES, MORE

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
