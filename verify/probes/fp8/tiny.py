"""Write tiny random models as Hugging Face checkpoints, and LoRA adapters for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch.verify.probes.answers import VOCAB

if TYPE_CHECKING:
    import torch

ADAPTERS, MERGED = ("one", "two", "three"), "merged"
_SIZES = dict(vocab_size=VOCAB, hidden_size=256, intermediate_size=512, max_position_embeddings=512)
_RANK, _ALPHA = 4, 12


def write(directory: Path, seed: int) -> Path:
    """Make ``directory`` a Hugging Face checkpoint of a random Qwen2; two seeds share no value.

    Norms and biases are random too, and all of it is wide enough that any tensor shows in the answers."""
    from flashpatch.verify.probes import verl_actor

    return verl_actor.write_model(directory, seed, std=0.08, norms=1.0, **_SIZES)


def round_to_int8(source: Path, directory: Path, description: dict[str, Any]) -> Path:
    """Make ``directory`` the int8 checkpoint of the one in ``source``, with this ``quantization_config``: a scale per row of each
    linear layer."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].bfloat16().float()  # an engine casts before it rounds
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    return _like(source, directory, tensors, quantization_config=description)


def adapted(workdir: Path) -> None:
    """Write models ``a`` and ``b``, the `ADAPTERS`, ``bad`` and `MERGED`, which is ``b`` with the last adapter in it."""
    import torch
    from safetensors.torch import load_file

    write(workdir / "a", seed=1)
    weights = load_file(write(workdir / "b", seed=2) / "model.safetensors")
    matrices = {name: value.shape for name, value in weights.items() if name.endswith("_proj.weight")}
    tensors: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(ADAPTERS):
        noise = torch.Generator().manual_seed(seed)
        for weight, (outputs, inputs) in matrices.items():
            for part, shape in (("A", (_RANK, inputs)), ("B", (outputs, _RANK))):
                key = f"base_model.model.{weight.replace('.weight', f'.lora_{part}.weight')}"
                tensors[key] = 0.05 * torch.randn(shape, generator=noise)
        _adapter(workdir / name, tensors)
    for weight in matrices:
        stem = f"base_model.model.{weight.removesuffix('.weight')}"
        product = tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
        weights[weight] += _ALPHA / _RANK * product
    _like(workdir / "b", workdir / MERGED, weights)
    spoiled = next(iter(tensors))
    _adapter(workdir / "bad", {**tensors, spoiled: tensors[spoiled][:, :-8].clone()})


def _adapter(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = dict(peft_type="LORA", r=_RANK, lora_alpha=_ALPHA, target_modules=targets, bias="none")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def _like(source: Path, folder: Path, tensors: dict[str, torch.Tensor], **more: Any) -> Path:
    """Write a checkpoint with the configuration of another, and ``more`` in it."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    return folder
