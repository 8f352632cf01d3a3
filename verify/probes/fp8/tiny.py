"""Write tiny random models as Hugging Face checkpoints, and LoRA adapters for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch.verify.probes.answers import VOCAB

if TYPE_CHECKING:
    import numpy

_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS = 256, 512, 2, 4, 2
ADAPTERS, MERGED = ("one", "two", "three"), "merged"
_RANK, _ALPHA = 4, 12


def write(directory: Path, seed: int) -> Path:
    """Make ``directory`` a Hugging Face checkpoint of a random Qwen2; two seeds share no value.

    Norms and biases are random too, and all of it is wide enough that any tensor shows in the answers.
    """
    import numpy

    noise = numpy.random.default_rng(seed)

    def random(*shape: int, around: float = 0.0) -> numpy.ndarray:
        return around + 0.08 * noise.standard_normal(shape, dtype=numpy.float32)

    kv = _HIDDEN // _HEADS * _KV_HEADS
    tensors = {
        "model.embed_tokens.weight": random(VOCAB, _HIDDEN),
        "model.norm.weight": random(_HIDDEN, around=1.0),
        "lm_head.weight": random(VOCAB, _HIDDEN),
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = random(_HIDDEN, around=1.0)
        for name, rows in (("q", _HIDDEN), ("k", kv), ("v", kv)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = random(rows, _HIDDEN)
            tensors[f"{at}.self_attn.{name}_proj.bias"] = random(rows)
        tensors[f"{at}.self_attn.o_proj.weight"] = random(_HIDDEN, _HIDDEN)
        for name, rows, columns in (
            ("gate", _INNER, _HIDDEN),
            ("up", _INNER, _HIDDEN),
            ("down", _HIDDEN, _INNER),
        ):
            tensors[f"{at}.mlp.{name}_proj.weight"] = random(rows, columns)
    return _checkpoint(directory, tensors)


def round_to_int8(source: Path, directory: Path, description: dict[str, Any]) -> Path:
    """Make ``directory`` the int8 checkpoint of the one in ``source``: a scale per row of each linear layer.

    Args:
        description: its ``quantization_config``.
    """
    import numpy
    from safetensors.numpy import load_file

    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = numpy.abs(tensors[name]).max(1, keepdims=True) / numpy.float32(127)
        tensors[name] = numpy.rint(tensors[name] / scale).astype(numpy.int8)
        tensors[f"{name}_scale"] = scale
    return _checkpoint(directory, tensors, quantization_config=description)


def adapted(workdir: Path) -> None:
    """Write models ``a`` and ``b``, the `ADAPTERS`, ``bad`` and `MERGED`, which is ``b`` with the last adapter in it."""
    import numpy
    from safetensors.numpy import load_file

    write(workdir / "a", seed=1)
    weights = load_file(write(workdir / "b", seed=2) / "model.safetensors")
    matrices = {name: value.shape for name, value in weights.items() if name.endswith("_proj.weight")}
    tensors: dict[str, numpy.ndarray] = {}
    for seed, name in enumerate(ADAPTERS):
        noise = numpy.random.default_rng(seed)
        for weight, (outputs, inputs) in matrices.items():
            for part, shape in (("A", (_RANK, inputs)), ("B", (outputs, _RANK))):
                key = f"base_model.model.{weight.replace('.weight', f'.lora_{part}.weight')}"
                tensors[key] = 0.05 * noise.standard_normal(shape, numpy.float32)
        _adapter(workdir / name, tensors)
    for weight in matrices:
        stem = f"base_model.model.{weight.removesuffix('.weight')}"
        product = tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
        weights[weight] += numpy.float32(_ALPHA / _RANK) * product
    _checkpoint(workdir / MERGED, weights)
    spoiled = next(iter(tensors))
    _adapter(workdir / "bad", {**tensors, spoiled: tensors[spoiled][:, :-8].copy()})


def _adapter(folder: Path, tensors: dict[str, numpy.ndarray]) -> None:
    from safetensors.numpy import save_file

    folder.mkdir()
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = dict(peft_type="LORA", r=_RANK, lora_alpha=_ALPHA, target_modules=targets, bias="none")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def _checkpoint(directory: Path, tensors: dict[str, numpy.ndarray], **more: Any) -> Path:
    from safetensors.numpy import save_file

    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**_config(), **more}))
    return directory


def _config() -> dict[str, Any]:
    return dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        vocab_size=VOCAB,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="float32",
    )
