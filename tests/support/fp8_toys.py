"""Models like vLLM's, small enough that an update takes milliseconds, and an engine that updates them.

A `Linear` is loaded through ``weight_loader`` into slices of a fused parameter, and then post-processed by its
``quant_method`` in one of the ways of `fp8_toy_methods.METHODS`. `Model` combines them with an embedding, tied or
not, norms, and an attention-like layer that is processed last."""

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from fp8_toy_methods import METHODS, Method, load_padded, load_shard, load_whole
from torch import nn

from flashpatch.patches._shared.context import having
from flashpatch.patches.fp8.update.model import LoaderAdapter, ManagedModel

HIDDEN, VOCAB, PADDED = 4, 10, 12


# -- the model ---------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """``shards`` matrices [HIDDEN, HIDDEN] fused into one parameter."""

    def __init__(self, method: str, shards: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shards * HIDDEN, HIDDEN), requires_grad=False)
        self.weight.weight_loader = functools.partial(load_shard, rows=HIDDEN)
        self.quant_method = METHODS[method]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN), requires_grad=False)
        self.register_buffer("bias", torch.zeros(HIDDEN))

    def forward(self, x):
        return x * self.weight + self.bias


class Embedding(nn.Module):
    """Rows beyond the vocabulary are padding, which the loader fills with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(PADDED, HIDDEN), requires_grad=False)
        self.weight.weight_loader = load_padded
        self.quant_method = Method()


class Attention(nn.Module):
    """Processed after all others. Its scale may be missing in a checkpoint; it is kept as a buffer and a float."""

    def __init__(self, source: Linear) -> None:
        super().__init__()
        self.sources = [source]
        self.register_buffer("_scale", torch.ones(()))
        self._scale_float = 1.0
        self.k_scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)

    def process(self) -> None:
        value = self.k_scale.item()
        self._scale.copy_(torch.tensor(value if value > 0 else 1.0))
        self._scale_float = self._scale.item()
        del self.k_scale

    def forward(self, x):
        return x * self._scale * self._scale_float


class Block(nn.Module):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.norm = Norm()
        self.qkv = Linear(method, shards=3)
        self.attn = Attention(self.qkv)
        self.down = Linear(method)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.down(torch.tanh(self.attn(q) * k + v))


class Model(nn.Module):
    """``blocks`` blocks whose linear layers are processed as ``method`` says."""

    def __init__(self, method: str = "transposed", blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = Embedding()
        self.layers = nn.ModuleList(Block(method) for _ in range(blocks))
        self.lm_head = Embedding()
        if tied:
            self.lm_head.weight = self.embed.weight
        self.tied = tied

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        params = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        loaded = set()
        for name, tensor in weights:
            if name == "lm_head.weight" and self.tied:
                continue
            fused, shard = name, None
            for index, part in enumerate("qkv"):
                if f".{part}.weight" in name:
                    fused, shard = name.replace(f".{part}.weight", ".qkv.weight"), index
            param = params[fused]
            loader = getattr(param, "weight_loader", load_whole)
            if isinstance(loader, functools.partial):
                loader(param, tensor, shard or 0)
            else:
                loader(param, tensor)
            loaded.add(fused)
        return loaded

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed.weight[tokens]
        for layer in self.layers:
            x = layer(x)
        return x @ self.lm_head.weight[:VOCAB].T


def checkpoint(
    seed: int, blocks: int = 2, tied: bool = False, scales: bool = False, buffers: bool = True
) -> list[tuple[str, torch.Tensor]]:
    """Named tensors of a random policy, in the order of a checkpoint; ``buffers``: the norms' biases too."""
    random = torch.Generator().manual_seed(seed)
    make = functools.partial(torch.randn, generator=random)
    weights = {"embed.weight": make(VOCAB, HIDDEN)}
    for i in range(blocks):
        for part in ("q", "k", "v", "down"):
            weights[f"layers.{i}.{part}.weight"] = make(HIDDEN, HIDDEN)
        weights[f"layers.{i}.norm.weight"] = make(HIDDEN)
        if buffers:
            weights[f"layers.{i}.norm.bias"] = make(HIDDEN)
        if scales:
            weights[f"layers.{i}.attn.k_scale"] = make(()).abs() + 0.5
    if not tied:
        weights["lm_head.weight"] = make(VOCAB, HIDDEN)
    return list(weights.items())


def process(module: nn.Module) -> None:
    """What vLLM's loader does to each module after loading."""
    if isinstance(getattr(module, "quant_method", None), Method):
        module.quant_method.process(module)
    if isinstance(module, Attention):
        module.process()


def process_all(model: nn.Module) -> None:
    modules = list(model.modules())
    for module in (
        *(m for m in modules if not isinstance(m, Attention)),
        *(m for m in modules if isinstance(m, Attention)),
    ):
        process(module)


class Adapter(LoaderAdapter):
    def process(self, module: nn.Module) -> None:
        process(module)

    def deferred(self, module: nn.Module) -> bool:
        return isinstance(module, Attention)


def adapter(device: str = "cpu", role: str = "target", **overrides: Any) -> LoaderAdapter:
    """Make a toy's adapter; an override stands for the method or attribute of its name."""
    made = Adapter(torch.device(device), role)
    vars(made).update(overrides)
    return made


def manage(
    model: nn.Module,
    atomic: str = "layer",
    partial: bool = False,
    in_flight: str = "refuse",
    **overrides: Any,
) -> ManagedModel:
    """Follow ``model``, just constructed, without anything loaded."""
    options = {"atomic": atomic, "partial": partial, "in_flight": in_flight}
    return ManagedModel(model, adapter(**overrides), options)


class Engine:
    """A model from birth to its first generation, updated through the transaction.

    Args:
        first: the checkpoint it is opened on; None for dummy weights."""

    def __init__(
        self,
        model: nn.Module,
        first: list[tuple[str, torch.Tensor]] | None,
        processing: Callable[[nn.Module], None] = process_all,
        **keywords: Any,
    ) -> None:
        self.model = model
        self.managed = manage(model, **keywords)
        if first is None:
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.uniform_(-1e-3, 1e-3)
        else:
            self.load(first)
        processing(model)
        self.managed.end_first_load()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], **keywords: Any) -> Any:
        return self.managed.load(self.model.load_weights, weights, **keywords)

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], **keywords: Any) -> None:
        self.load(weights)
        self.managed.finish(**keywords)

    def takes(self, weights: list[tuple[str, torch.Tensor]], method: str = "transposed") -> bool:
        """Update; return whether the model answers as one that has only ever seen ``weights``."""
        self.update(weights)
        return same_answers(self.model, fresh(method, weights, self.model.tied))

    def check_failed(self, before: dict) -> None:
        """Check what a failed update leaves: the bits ``before``, under ``atomic="model"``, or no generation."""
        kept = self.managed.options["atomic"] == "model"
        assert self.managed.may_generate == kept and (not kept or same_bits(before, state(self.model)))

    def fail_to_process(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Update, while the processing of the last linear layer fails once it has been done."""
        good = self.managed.adapter.process

        def fails(module: nn.Module) -> None:
            good(module)
            if module is self.model.layers[1].down:
                raise MemoryError("no room to repack")

        with having(self.managed.adapter, "process", fails), pytest.raises(MemoryError):
            self.update(weights)


def engine(
    method: str = "transposed", seed: int | None = 0, tied: bool = False, scales: bool = False, **kw
) -> Engine:
    """An `Engine` on ``checkpoint(seed)``; dummy weights when ``seed`` is None."""
    first = None if seed is None else checkpoint(seed, tied=tied, scales=scales)
    return Engine(Model(method, tied=tied), first, **kw)


def fresh(method: str, weights: list[tuple[str, torch.Tensor]], tied: bool = False) -> Model:
    """The oracle: a model that has only ever seen ``weights`` and no transaction."""
    model = Model(method, tied=tied)
    model.load_weights(weights)
    process_all(model)
    return model


TOKENS = torch.arange(VOCAB)


def same_answers(model: nn.Module, other: nn.Module) -> bool:
    return torch.equal(model(TOKENS), other(TOKENS))


def state(model: nn.Module) -> dict[str, tuple[int, int, torch.Tensor]]:
    """Name to (object, address, copy of the values), of every parameter and buffer."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: (id(t), t.data_ptr(), t.detach().clone()) for name, t in named}


def same_places(before: dict, after: dict) -> bool:
    return {k: v[:2] for k, v in before.items()} == {k: v[:2] for k, v in after.items()}


def same_bits(before: dict, after: dict) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[k][2], after[k][2]) for k in before)


def tensors() -> int:
    """Live tensors in this process."""
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def cut(weights: list, *points: int) -> Iterator[list]:
    """``weights`` in buckets, cut before each of ``points``."""
    edges = [0, *points, len(weights)]
    return (weights[a:b] for a, b in zip(edges, edges[1:]))


def broken_off(weights: list, index: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights up to ``index``, then the sender's connection ends."""
    yield from weights[:index]
    raise ConnectionError("the sender died")
