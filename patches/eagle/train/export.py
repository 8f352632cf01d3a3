"""Write drafters as the engines read them."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from flashpatch.patches.eagle.errors import eagle_error
from flashpatch.patches.eagle.train.drafter import Drafter
from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings

ENGINES = ("vllm", "sglang")


def engine_weights(
    weights: Mapping[str, Tensor],
    config: PretrainedConfig,
    engine: str,
    target_embeddings: TargetEmbeddings | None = None,
) -> dict[str, Tensor]:
    """Return the drafter's weights under the names, and with the extra tensors, that an engine's loader expects.

    SGLang's EAGLE-1 model has a bias on ``fc`` that stays random when the checkpoint lacks it, so it is written as
    zeros; vLLM's has none and refuses it. An EAGLE-3 checkpoint holds the target's head. Raises PatchError for an
    unknown engine, or an EAGLE-3 drafter without the target's head."""
    if engine not in ENGINES:
        raise eagle_error(
            None, f"no drafter format is known for {engine!r}.", f"Choose {' or '.join(ENGINES)}."
        )
    found = {name: tensor.detach() for name, tensor in weights.items()}
    dtype = found["fc.weight"].dtype
    if config.eagle_kind == "eagle3":
        if target_embeddings is None:
            raise eagle_error(
                "drafter", "an EAGLE-3 drafter is written with the target's head.", "Give target_embeddings."
            )
        found["lm_head.weight"] = target_embeddings.head.to("cpu", dtype)
    elif engine == "sglang":
        found["fc.bias"] = torch.zeros(config.hidden_size, dtype=dtype)
    return found


def engine_config(config: PretrainedConfig, engine: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return ``config.json`` for an engine, which chooses the model class by it.

    vLLM has one EAGLE-1 class, Llama's; a Qwen2 layer is there a Llama layer with biases on q, k and v."""
    plain = copy.deepcopy(config).to_dict()
    plain = {name: value for name, value in plain.items() if value is not None and not name.startswith("_")}
    plain["torch_dtype"] = plain["dtype"] = str(dtype).removeprefix("torch.")
    rope = plain.get("rope_parameters") or {}
    if "rope_theta" in rope:
        plain["rope_theta"] = rope["rope_theta"]
    if config.eagle_kind == "eagle3":
        plain |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": config.vocab_size}
        plain["tie_word_embeddings"] = False
    elif engine == "sglang":
        family = "Qwen2" if config.model_type == "qwen2" else "Llama"
        plain["architectures"] = [f"{family}ForCausalLMEagle"]
    else:
        plain |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        if config.model_type == "qwen2":
            plain |= {"qkv_bias": True, "attention_bias": False, "mlp_bias": False}
            for name in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"):
                plain.pop(name, None)
    return plain


def save_drafter(
    folder: str | os.PathLike[str],
    weights: Mapping[str, Tensor],
    config: PretrainedConfig,
    engine: str,
    target_embeddings: TargetEmbeddings | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a drafter for the engine's ``speculative`` setting, private to the user; whole or not at all.

    Args:
        folder: made, or replaced.
        weights: full tensors on the CPU, by the names of `Drafter`.
        tokenizer: folder whose tokenizer files are copied along, if given.

    Raises:
        PatchError: see `engine_weights`.
        OSError: the disk is full or cannot be written; nothing is left behind."""
    final = Path(folder)
    found = engine_weights(weights, config, engine, target_embeddings)
    temporary = final.parent / f".{final.name}-{os.getpid()}"
    try:
        for made in (final.parent, temporary):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        write = {name: tensor.contiguous().cpu() for name, tensor in found.items()}
        try:
            save_file(write, temporary / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"cannot write {temporary}: {error}") from error
        plain = engine_config(config, engine, found["fc.weight"].dtype)
        (temporary / "config.json").write_text(json.dumps(plain, indent=1))
        for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
            if (Path(tokenizer) / name).exists():
                shutil.copy(Path(tokenizer) / name, temporary)
        for file in temporary.iterdir():
            file.chmod(0o600)  # a tokenizer is copied with its mode
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def load_weights(drafter: Drafter, folder: str | os.PathLike[str]) -> None:
    """Load into a drafter what `save_drafter`, or another trainer of such drafters, wrote. Raises PatchError if the
    file is damaged, or its weights are not those of this drafter."""
    path = Path(folder) / "model.safetensors"
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise eagle_error(
            "drafter", f"{path} cannot be read: {error}.", "Give the folder of a drafter in safetensors."
        ) from error
    shared = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d")
    found = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    bias = found.pop("fc.bias", None) if "fc.bias" not in drafter.state_dict() else None
    if bias is not None and bias.any():
        raise eagle_error(
            "drafter", f"{path} has a bias on fc, which this drafter lacks.", "Train one from scratch."
        )
    found = {name: tensor for name, tensor in found.items() if name not in shared}
    wanted = drafter.state_dict()
    odd = sorted(wanted.keys() ^ found.keys()) or [n for n in wanted if wanted[n].shape != found[n].shape]
    if odd:
        raise eagle_error(
            "drafter",
            f"{path} is another drafter: {', '.join(odd[:4])} differ.",
            "Check that it was trained for this target and kind.",
        )
    drafter.load_state_dict(found)
