"""Write drafters beside those of the probe of family eagle, for its tiny targets."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from flashpatch.verify.probes.eagle import tiny


def noisy(directory: Path, original: Path, share: float = 0.02, seed: int = 9) -> Path:
    """Write a copy of a checkpoint with noise, which as a draft model is sometimes right."""
    noise = torch.Generator().manual_seed(seed)
    tensors = load_file(original / "model.safetensors")
    tensors = {
        name: tensor + share * tiny.random(noise, *tensor.shape, wide=1.0) for name, tensor in tensors.items()
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text((original / "config.json").read_text())
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def drafter3(directory: Path, seed: int = 5) -> Path:
    """Write an EAGLE-3 drafter of noise."""
    noise = torch.Generator().manual_seed(seed)
    tensors = {
        "fc.weight": tiny.random(noise, tiny.HIDDEN, 3 * tiny.HIDDEN),
        "norm.weight": torch.ones(tiny.HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(tiny.HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(tiny.HIDDEN),
        "lm_head.weight": tiny.random(noise, tiny.VOCAB, tiny.HIDDEN),
        **tiny.layer("midlayer.", noise, 1.0, inputs=2 * tiny.HIDDEN),
    }
    return tiny.write(directory, tensors, "LlamaForCausalLMEagle3", 1, draft_vocab_size=tiny.VOCAB)
