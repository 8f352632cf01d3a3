"""A vLLM engine in this process in a toy's place: each name of the toys stands for a group of the engine's tensors."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
import update_toys
import vllm_updates as updates
from update_machine import Updates
from update_spec import ERROR, Spec
from update_toys import EMBEDDING, HEAD, NAMES, Options, Toy
from vllm_lab import engines

from flashpatch.errors import PatchError
from flashpatch.patches.fp8 import model_registry

Q, K, V, DOWN, NORM, REST = (name for name in NAMES if name not in (EMBEDDING, HEAD))
SHAPES = {"q_proj": 256, "k_proj": 128, "v_proj": 128}  # rows of a layer of the laboratory's Qwen2
LAYERS = {**update_toys.LAYERS, NORM: "norm", REST: "rest"}
GROUPS = {
    EMBEDDING: {"model.embed_tokens.weight": (256, 256)},
    HEAD: {"lm_head.weight": (256, 256)},
    **{
        name: {f"model.layers.0.self_attn.{part}.{kind}": (rows, 256)[: 1 + (kind == "weight")] for kind in ("weight", "bias")}
        for name, (part, rows) in zip((Q, K, V), SHAPES.items())
    },
    DOWN: {"model.layers.0.mlp.down_proj.weight": (256, 512)},
    NORM: {"model.layers.0.input_layernorm.weight": (256,)},
    REST: {
        "model.layers.0.self_attn.o_proj.weight": (256, 256),
        "model.layers.0.mlp.gate_proj.weight": (512, 256),
        "model.layers.0.mlp.up_proj.weight": (512, 256),
        "model.layers.0.post_attention_layernorm.weight": (256,),
        "model.norm.weight": (256,),
    },
}  # fmt: skip


class EngineToy(Toy):
    """One engine for many sequences: each begins with a session that brings policy 0, after an end that clears the anchor."""

    def __init__(self, llm: Any, atomic: str) -> None:
        self.llm, self.options, self.tied = llm, Options(atomic), False
        model = engines.inner_model(llm)
        self.managed = [model_registry.get(model)]
        self.engines = [SimpleNamespace(model=model, managed=self.managed[0], load=self._send)]
        self.raised, self.calls = [], 0
        with suppress(PatchError):
            self.managed[0].finish()
        self.managed[0].begin()
        self._send(pair for name in NAMES for pair in self._tensors(name, 0))
        self.managed[0].finish()
        self.managed[0].finish()  # an end by itself clears the anchor
        self.managed[0]._update.boundaries.ends = False  # what another sequence has stated
        self.spec = Spec(LAYERS, atomic)
        self.spec.version = self.managed[0].version
        self._versions = [self.spec.version], self.spec.version
        self.check()

    def _send(self, weights: Any) -> None:
        self.llm.collective_rpc(_load, args=(weights,))

    def _tensors(self, name: str, number: int | str) -> list[tuple[str, torch.Tensor]]:
        value = update_toys.pattern(name, number, False).flatten()[0].item()
        return [(one, torch.full(shape, value)) for one, shape in GROUPS[name].items()]

    def request(self) -> bool:
        """Ask the engine itself."""
        self.calls += 1
        due = self.spec.request()
        refused = updates.refusal(self.llm)
        assert (refused is None) == self.managed[0].may_generate, f"{refused}; {self}"
        self.spec.ended(due == ERROR)
        self.check()
        return refused is None

    def discard(self) -> None:
        """Under "model" nothing helps after that, and the engine is of all sequences."""
        if self.options.atomic == "layer":
            super().discard()

    def live(self, engine: Any = None) -> dict[str, int | None | str]:
        """As its kernels multiply with it, wherever they keep it."""
        model = self.engines[0].model
        block, found = model.model.layers[0], {}
        with torch.no_grad():
            for name, layer in (("qkv", block.self_attn.qkv_proj), ("o", block.self_attn.o_proj), ("gate_up", block.mlp.gate_up_proj),
                                ("down", block.mlp.down_proj), ("head", model.lm_head)):  # fmt: skip
                eye, bias = torch.eye(512 if name == "down" else 256), getattr(layer, "bias", None)
                product = layer.quant_method.apply(layer, eye).T
                found[name] = [product] if bias is None else [product, bias]
        parts = dict(zip((Q, K, V), zip(*(one.split(list(SHAPES.values())) for one in found["qkv"]))))
        parts |= {DOWN: found["down"], HEAD: found["head"], EMBEDDING: [model.model.embed_tokens.weight]}
        parts |= {NORM: [block.input_layernorm.weight]}
        parts |= {
            REST: [
                *found["o"],
                *found["gate_up"],
                block.post_attention_layernorm.weight,
                model.model.norm.weight,
            ]
        }
        return {name: self._number(name, torch.cat([one.flatten() for one in parts[name]])) for name in NAMES}

    def _number(self, name: str, tensor: torch.Tensor) -> int | None | str:
        number = int(tensor[0].nan_to_num(-1).floor())
        same = (tensor == update_toys.pattern(name, number, False).flatten()[0]).all()
        return number if same else f"no number: {tensor.unique().tolist()}"


def _load(worker: Any, weights: Any) -> None:
    worker.model_runner.model.load_weights(weights)


def machine(llm: Any, atomic: str) -> type[Updates]:
    """Return the machine that drives this engine."""

    class Engine(Updates):
        def opened(self, options: Options) -> Toy:
            return EngineToy(llm, atomic)

    return Engine
