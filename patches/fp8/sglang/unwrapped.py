"""Update a model whose layers SGLang has wrapped for LoRA adapters: its loader knows them without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def untested(model: torch.nn.Module) -> str:
    """Return what in the model was never updated beside adapters; empty if there is nothing."""
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    return "experts" if any(isinstance(module, FusedMoEWithLoRA) for module in model.modules()) else ""


@contextmanager
def layers(model: torch.nn.Module) -> Iterator[None]:
    """Within, layers stand in the model as they did before they were wrapped; afterwards wrappers have their new parameters.

    A wrapper has the layer's weight and bias as its own too. Of an embedding that is the head as well SGLang makes two
    layers with one weight.
    """
    from sglang.srt.lora.layers import BaseLayerWithLoRA
    from sglang.srt.utils import replace_submodule

    wrapped = [(name, one) for name, one in model.named_modules() if isinstance(one, BaseLayerWithLoRA)]
    first: dict[int, torch.nn.Module] = {}  # id of a weight -> the layer that had it before another was made
    for _, one in wrapped:
        first.setdefault(id(getattr(one.base_layer, "weight", one)), one.base_layer)
    plain = [(name, first[id(getattr(one.base_layer, "weight", one))]) for name, one in wrapped]
    for name, layer in plain:
        replace_submodule(model, name, layer)
    try:
        yield
    finally:
        for (name, one), (_, layer) in zip(wrapped, plain, strict=True):
            replace_submodule(model, name, one)
            for own in ("weight", "bias"):
                if own in one._parameters:
                    one.base_layer._parameters[own] = one._parameters[own] = layer._parameters[own]
