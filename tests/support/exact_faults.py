"""Checkpoints with one fault each, for an engine that is to be compared with the model as it should be."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

Tensors = dict[str, Any]
LAYER = "model.layers.1"


def _swap_q_and_k(tensors: Tensors) -> None:
    """Heads of one size: the keys' take the place of the first queries'."""
    q, k = (tensors[f"{LAYER}.self_attn.{part}_proj.weight"] for part in "qk")
    first = q[: k.shape[0]].clone()
    q[: k.shape[0]] = k
    k.copy_(first)


def _scale_one_channel(tensors: Tensors) -> None:
    tensors[f"{LAYER}.mlp.down_proj.weight"][7] *= 2


def _scale_a_little(tensors: Tensors) -> None:
    """What rounding to eight bits is as large as: weights, a row of weights, a bias."""
    tensors["model.layers.0.mlp.down_proj.weight"] *= 1.1
    tensors[f"{LAYER}.self_attn.v_proj.bias"].zero_()
    _scale_one_channel(tensors)


def _keep_one_layer(tensors: Tensors) -> None:
    """The layer of an older policy."""
    for name, tensor in tensors.items():
        if name.startswith(f"{LAYER}.") and "norm" not in name:
            tensor.copy_(tensor.roll(1, 0))


def _keep_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"].copy_(tensors["lm_head.weight"].roll(1, 0))


def _keep_unread_rows(tensors: Tensors) -> None:
    """Of the embedding, all but those of the tokens that are compared of a model without a tokenizer."""
    import torch

    from flashpatch.verify.exact.command import RANDOM_TOKENS

    weight = tensors["model.embed_tokens.weight"]
    unread = torch.ones(len(weight), dtype=torch.bool)
    unread[torch.randint(len(weight), (RANDOM_TOKENS,), generator=torch.Generator().manual_seed(0))] = False
    weight[unread] = weight[unread].roll(1, 0)


def _permute_experts(tensors: Tensors) -> None:
    """Experts 0 and 1 exchanged; the router is not."""
    for name in [name for name in tensors if f"{LAYER}.mlp.experts.0." in name]:
        other = name.replace("experts.0.", "experts.1.")
        first = tensors[name].clone()
        tensors[name].copy_(tensors[other])
        tensors[other].copy_(first)


def _drop_router_bias(tensors: Tensors) -> None:
    """The correction that decides which experts are chosen."""
    tensors[f"{LAYER}.mlp.gate.e_score_correction_bias"].zero_()


def _keep_router(tensors: Tensors) -> None:
    """The router of an older policy."""
    weight = tensors[f"{LAYER}.mlp.gate.weight"]
    weight.copy_(weight.roll(1, 0))


def _round_norm(tensors: Tensors) -> None:
    """A norm whose weights went through eight bits."""
    import torch

    weight = tensors[f"{LAYER}.post_attention_layernorm.weight"]
    weight.copy_(weight.to(torch.float8_e5m2))


def _rope(config: dict) -> None:
    for scope in (config, config.get("rope_parameters") or {}):
        if "rope_theta" in scope:
            scope["rope_theta"] = 500.0


def _scaling(config: dict) -> None:
    """None for long texts; the shortest wavelengths are the same."""
    config["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }


def _window(config: dict) -> None:
    config["sliding_window"] -= 1


def _set(**values: Any) -> Callable[[dict], None]:
    return lambda config: config.update(values)


NO_CAP = _set(attn_logit_softcapping=0.0)  # in a word that SGLang's kernels take too
FAULTS: dict[str, tuple[str, Callable[[Any], None], str, str]] = {
    "q and k swapped": ("llama", _swap_q_and_k, "tensors", f"{LAYER}.self_attn.qkv_proj"),
    "one channel's scale": ("llama", _scale_one_channel, "tensors", f"{LAYER}.mlp.down_proj"),
    "a layer not updated": ("llama", _keep_one_layer, "tensors", f"{LAYER}.self_attn.qkv_proj"),
    "head stale": ("llama", _keep_head, "tensors", "logits"),
    "rows stale": ("llama", _keep_unread_rows, "tensors", "model.embed_tokens"),
    "rope theta": ("llama", _rope, "config", "into model.layers.0.self_attn.o_proj"),
    "rope scaling": ("llama3.1", _scaling, "config", "into model.layers.0.self_attn.o_proj"),
    "as small as rounding": ("llama-biased", _scale_a_little, "tensors", "model.layers.0.mlp.down_proj"),
    "rms eps": ("llama", _set(rms_norm_eps=0.1), "config", "model.layers.0.input_layernorm"),
    "experts exchanged": ("qwen3-moe", _permute_experts, "tensors", f"{LAYER}.mlp"),
    "router bias": ("glm4-moe", _drop_router_bias, "tensors", f"{LAYER}.mlp"),
    "router stale": ("qwen3-moe", _keep_router, "tensors", f"{LAYER}.mlp.gate"),
    "a norm in eight bits": ("llama", _round_norm, "tensors", f"{LAYER}.post_attention_layernorm"),
    "softcap of logits": ("gemma2", _set(final_logit_softcapping=None), "config", "logits"),
    "softcap of attention": ("gemma2", NO_CAP, "config", "into model.layers.0.self_attn.o_proj"),
    "sliding window": ("gemma3", _window, "config", "into model.layers.0.self_attn.o_proj"),
}
"""By name: family of the model, what plants the fault, where, and the place that must be named."""


def plant(source: Path, fault: str, folder: Path) -> Path:
    """Return a copy of the checkpoint ``source`` in ``folder`` with the fault in it."""
    from safetensors.torch import load_file, save_file

    _, act, where, _ = FAULTS[fault]
    copy = folder / fault.replace(" ", "-")
    shutil.copytree(source, copy)
    if where == "config":
        config = json.loads((copy / "config.json").read_text())
        act(config)
        (copy / "config.json").write_text(json.dumps(config))
        return copy
    (file,) = copy.glob("*.safetensors")
    tensors = load_file(file)
    act(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return copy


@contextlib.contextmanager
def planted(*act: Any) -> Iterator[None]:
    """Within, a vLLM engine that `flashpatch.verify.exact` opens calls ``act``, a function and what it takes, in each of its workers."""
    from flashpatch.verify.exact import engine

    opened = engine.opened

    @contextlib.contextmanager
    def spoilt(**arguments: Any) -> Iterator[Any]:
        with opened(**arguments) as llm:
            if act:
                llm.collective_rpc(act[0], args=act[1:])
            yield llm

    with mock.patch.object(engine, "opened", spoilt):
        yield


def some_full(names: Iterable[str], soon: Container[str]) -> list[Any]:
    """Parameters by name; all but those of ``soon`` are marked `full`."""
    return [pytest.param(one, marks=() if one in soon else pytest.mark.full, id=str(one)) for one in names]


def passed(engine: Any, ids: list[int], quantization: str = "", more: list[int] | None = None) -> Any:
    """What a Hugging Face model, which then computes so for good, does with these tokens as an engine of this precision, and with as many,
    or ``more``, each expert in turn; not if that is empty."""
    import torch

    from flashpatch.verify.exact.calls import recorded
    from flashpatch.verify.exact.compare import as_served, logits
    from flashpatch.verify.exact.engine import Pass
    from flashpatch.verify.exact.forced import Part
    from flashpatch.verify.exact.routers import ROUTER, choosing, in_turn
    from flashpatch.verify.exact.rows import of_model

    def read(tokens: list[int], routers: dict[str, Any], **how: Any) -> Any:
        with choosing(engine, routers, False), recorded(engine) as calls:
            return Pass(calls, logits(engine, tokens), quantization, ids=tokens, rows=of_model(engine), **how)

    as_served(engine, Pass([], torch.empty(0), quantization))
    found, more = read(ids, {}), ids if more is None else more
    if not more:
        return found
    wide = {call.name: call.returned.shape[-1] for call in found.calls if ROUTER.search(call.name)}
    routers = {name: in_turn(len(more), 0, size) for name, size in wide.items()}
    return dataclasses.replace(found, also=(read(more, routers, part=Part(turns=True)),))
