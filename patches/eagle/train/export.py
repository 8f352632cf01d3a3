"""Read drafters, and write them as the engines read them."""

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
from transformers import AutoConfig, PretrainedConfig

from flashpatch.patches._shared.checkpoint_shapes import files
from flashpatch.patches.eagle.drafter_refit import checkpoint
from flashpatch.patches.eagle.errors import eagle_error
from flashpatch.patches.eagle.train.drafter import Drafter, make_drafter
from flashpatch.patches.eagle.train.drafter_config import UNTRAINED, drafter_config
from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings

_NOT_TRAINED = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d")
"""Tensors of a checkpoint that stay as they are, unless the drafter has them."""


def engine_weights(
    weights: Mapping[str, Tensor],
    config: PretrainedConfig,
    engine: str,
    target_embeddings: TargetEmbeddings | None = None,
    own: str | os.PathLike[str] = "",
) -> dict[str, Tensor]:
    """Return the drafter's weights under the names, and with the extra tensors, that an engine's loader expects.

    These are those of the folder ``own``, the drafter that the engine was opened with. For a drafter from scratch,
    SGLang's EAGLE-1 model has a bias on ``fc`` that stays random when the checkpoint lacks it, so it is written as
    zeros; vLLM's has none and refuses it. An EAGLE-3 checkpoint holds the drafter's head or else the target's, which
    ``target_embeddings`` have."""
    found = {name: tensor.detach() for name, tensor in weights.items()}
    dtype = found["fc.weight"].dtype
    if config.eagle_kind == "eagle3" and config.eagle_head == "target":
        found["lm_head.weight"] = target_embeddings.head.to("cpu", dtype)
    elif config.eagle_kind == "eagle" and engine == "sglang":
        found.setdefault("fc.bias", torch.zeros(config.hidden_size, dtype=dtype))
    if not own:
        return found
    theirs = read_tensors(own, config.eagle_kind)
    return {name: found.get(plain, tensor) for plain, (name, tensor) in theirs.items()}


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
        plain["architectures"] = ["LlamaForCausalLMEagle3"]
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
    own: str | os.PathLike[str] = "",
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a drafter for the engine's ``speculative`` setting, private to the user; whole or not at all.

    Args:
        folder: made, or replaced.
        weights: full tensors on the CPU, by the names of `Drafter`.
        own: folder of the drafter that it continues, whose names and configuration are kept.
        dtype: of what is written; None: as the weights are.

    Raises:
        OSError: the disk is full or cannot be written; nothing is left behind."""
    final = Path(folder)
    weights = {name: one.to(dtype=dtype) if one.is_floating_point() else one for name, one in weights.items()}
    found = engine_weights(weights, config, engine, target_embeddings, own)
    temporary = final.parent / f".{final.name}-{os.getpid()}"
    try:
        for made in (final.parent, temporary):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        write = {name: tensor.contiguous().cpu() for name, tensor in found.items()}
        try:
            save_file(write, temporary / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"cannot write {temporary}: {error}") from error
        plain = engine_config(config, engine, weights["fc.weight"].dtype)
        if own:
            plain = {**json.loads((Path(own) / "config.json").read_text()), "torch_dtype": plain["dtype"]}
        (temporary / "config.json").write_text(json.dumps(plain, indent=1))
        for file in temporary.iterdir():
            file.chmod(0o600)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def written(folder: Path) -> dict[int, Path]:
    """Return the drafters that a trainer has written into a folder, by the number of its steps."""
    steps = {one.name.partition("-")[2]: one for one in folder.glob("drafter-*")}
    return {int(number): one for number, one in steps.items() if number.isdecimal()}


def read_tensors(folder: str | os.PathLike[str], kind: str) -> dict[str, tuple[str, Tensor]]:
    """Read a drafter's tensors by their names in `Drafter`, each with its name in the checkpoint.

    Raises PatchError if there are none, or a file is damaged."""
    found: dict[str, Tensor] = {}
    try:
        for file in files(Path(folder)) or [Path(folder) / "model.safetensors"]:
            found |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise eagle_error(
            "drafter", f"{file} cannot be read: {error}.", "Give the folder of a drafter in safetensors."
        ) from error
    plain = {name: name.removeprefix("model.") for name in found}
    if kind == "eagle3":  # trainers name its layer in two ways
        plain = {name: one.replace("layers.0.", "midlayer.") for name, one in plain.items()}
    return {plain[name]: (name, tensor) for name, tensor in found.items()}


def load_weights(drafter: Drafter, folder: str | os.PathLike[str]) -> None:
    """Load into a drafter what `save_drafter`, or another trainer of such drafters, wrote. Raises PatchError if the
    file is damaged, or its weights are not those of this drafter."""
    wanted = drafter.state_dict()
    found = {name: tensor for name, (_, tensor) in read_tensors(folder, drafter.config.eagle_kind).items()}
    bias = found.pop("fc.bias", None) if "fc.bias" not in wanted else None
    if bias is not None and bias.any():
        raise eagle_error(
            "drafter", f"{folder} has a bias on fc, which this drafter lacks.", "Train one from scratch."
        )
    mask = found.get("t2d")
    found = {name: tensor for name, tensor in found.items() if name in wanted or name not in _NOT_TRAINED}
    odd = sorted(wanted.keys() ^ found.keys()) or [n for n in wanted if wanted[n].shape != found[n].shape]
    if odd:
        raise eagle_error(
            "drafter",
            f"{folder} is another drafter: {', '.join(odd[:4])} differ.",
            "Check that it was trained for this target and kind.",
        )
    drafter.load_state_dict(found)
    ids, size = drafter.vocabulary(), drafter.config.vocab_size
    if ids is not None:
        drafted = torch.bincount(ids.clamp(0, size - 1), minlength=size)
        if drafted.max() > 1 or (mask is not None and not torch.equal(drafted > 0, mask)):
            raise eagle_error("drafter", f"{folder} has d2t and t2d that contradict each other.", UNTRAINED)


def check_round_trip(
    folder: str | os.PathLike[str], target: str | os.PathLike[str], kind: str, engine: str
) -> None:
    """Load a drafter, and check what an engine would get of it. Raises PatchError that names what cannot be trained."""
    config = drafter_config(AutoConfig.from_pretrained(target), kind, own=folder)
    if config.fc_bias and engine == "vllm":
        raise eagle_error("drafter", f"{folder} has fc.bias, which vLLM's EAGLE-1 lacks.", UNTRAINED)
    drafter = make_drafter(config)
    load_weights(drafter, folder)
    written = engine_weights(drafter.state_dict(), config, engine, TargetEmbeddings.load(target), folder)
    checkpoint.check(written, Path(folder), set(), folder, "eagle")


def own_embedding(folder: str | os.PathLike[str], kind: str, target: TargetEmbeddings) -> Tensor | None:
    """Return the token embeddings of a drafter that vLLM keeps apart from the target's, as it does if they differ."""
    _, found = read_tensors(folder, kind).get("embed_tokens.weight", ("", None))
    return None if found is None or torch.equal(found.to(target.embedding), target.embedding) else found
