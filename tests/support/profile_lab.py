"""Tiny models of several families, and a quantizer that works as SmoothQuant and compressed-tensors do.

It knows the layers by name and rounds with numpy, so that nothing under test is used to make what it is tested on."""

import shutil
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from vllm_lab import models

from flashpatch.patches.fp8.precision.quantize import quantized

FAMILIES = ("qwen2", "llama", "qwen3", "gemma", "gemma3_text")
VOCAB = 128
_NORM_AFTER = {"gemma3_text": "pre_feedforward_layernorm"}


def random_model(family: str, seed: int = 0):
    """A model of a family in bf16; norms and biases are random too."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, max_position_embeddings=256)
    sizes |= dict(num_attention_heads=4, head_dim=16, num_key_value_heads=2)
    sizes |= dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    sizes |= dict(tie_word_embeddings=family.startswith("gemma"))
    if "moe" in family:
        sizes |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    config = CONFIG_MAPPING[family](**sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter.data, 0.2, 1.2)
        else:
            torch.nn.init.normal_(parameter.data, std=0.08)
    return model


def build(directory: Path, family: str, seed: int = 0) -> Path:
    """The checkpoint of such a model."""
    random_model(family, seed).save_pretrained(directory, max_shard_size="100KB")
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return dict(models.weights(directory))


def quantize(
    model: Path,
    directory: Path,
    family: str,
    *,
    form: str = "int8",
    granularity: str = "channel",
    norms: bool = True,
    linears: bool = True,
    seed: int = 1,
) -> dict[str, numpy.ndarray]:
    """Write ``model`` quantized to ``directory``; returns the scales used, by producer."""
    held, scales = tensors(model), {}
    noise = numpy.random.default_rng(seed)
    offset = 1.0 if family.startswith("gemma") else 0.0

    def random(size: int) -> torch.Tensor:
        return torch.tensor(numpy.exp(noise.normal(0, 0.7, size)), dtype=torch.bfloat16)

    layers = {name.split(".")[2] for name in held if name.startswith("model.layers.")}
    for layer in sorted(layers, key=int):
        at = f"model.layers.{layer}."
        pairs = []
        if norms:
            after = _NORM_AFTER.get(family, "post_attention_layernorm")
            pairs += [
                ("input_layernorm", [f"self_attn.{x}_proj" for x in "qkv"]),
                (after, ["mlp.gate_proj", "mlp.up_proj"]),
            ]
        for norm, consumers in pairs:
            scale = random(64)
            scales[at + norm] = scale.double().numpy()
            held[f"{at}{norm}.weight"] = (
                (held[f"{at}{norm}.weight"].float() + offset) / scale.float() - offset
            ).bfloat16()
            for consumer in consumers:
                held[f"{at}{consumer}.weight"] *= scale
        if linears:
            scale = random(96)
            scales[f"{at}mlp.up_proj"] = scale.double().numpy()
            held[f"{at}mlp.up_proj.weight"] /= scale[:, None]
            held[f"{at}mlp.down_proj.weight"] *= scale
            scale = random(32)  # two key-value heads of 16, four query heads
            scales[f"{at}self_attn.v_proj"] = scale.double().numpy()
            held[f"{at}self_attn.v_proj.weight"] /= scale[:, None]
            if f"{at}self_attn.v_proj.bias" in held:
                held[f"{at}self_attn.v_proj.bias"] /= scale
            spread = scale.reshape(2, 1, 16).expand(2, 2, 16).reshape(64)
            held[f"{at}self_attn.o_proj.weight"] *= spread
    for name in [n for n in held if ".layers." in n and n.endswith("_proj.weight")]:
        values, scale = _rounded(held[name].float().numpy(), form, granularity)
        held[name], held[f"{name}_scale"] = values, scale
    directory.mkdir()
    shutil.copy(model / "config.json", directory)
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, directory / "model.safetensors")
    return scales


def _rounded(weight: numpy.ndarray, form: str, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    amax = numpy.abs(weight).max(1, keepdims=True) if granularity == "channel" else numpy.abs(weight).max()
    if form == "int8":  # the range of compressed-tensors: -128 to 127
        scale = torch.tensor(amax / 127.5).bfloat16()
        values = numpy.clip(numpy.round(weight / scale.float().numpy()), -128, 127).astype(numpy.int8)
        return torch.tensor(values), scale
    scale = torch.tensor(amax / 448).bfloat16()
    return torch.tensor(weight / scale.float().numpy()).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def rounded(weights, profile, form: str = "int8") -> dict[str, torch.Tensor]:
    """Return a model's weights, smoothed and rounded as the profile says, each scale as ``NAME_scale``."""
    found = {}
    for name, tensor in weights:
        found[name] = profile.smoothed(name, tensor)
        if name in profile.quantized:
            found[name], found[f"{name}_scale"] = quantized(found[name], form)
    return found


def edit(directory: Path, change) -> None:
    """Let ``change`` alter the dictionary of tensors of a one-file checkpoint."""
    held = tensors(directory)
    change(held)
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, directory / "model.safetensors")
