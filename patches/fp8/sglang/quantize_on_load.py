"""Quantize the trainer's bf16 weights for an int8 model while they are loaded.

Each row (output channel) has a scale of its own, so a shard of a fused layer is rounded by itself, and the sender
needs no second copy of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import torch

from flashpatch.patches.fp8.precision import quantize
from flashpatch.patches.fp8.refit.managed_model import ManagedModel


def quantizing(managed: ManagedModel, load_weights: Callable) -> Callable:
    """Wrap ``load_weights`` so that it also takes floating tensors for int8 parameters with a ``weight_scale``."""

    @functools.wraps(load_weights)
    def load(weights: Iterable[tuple[str, torch.Tensor]], *args, **kwargs):
        if managed.state != "loading":
            weights = _quantized(weights, _scale_names(managed))
        return load_weights(weights, *args, **kwargs)

    return load


def _quantized(
    weights: Iterable[tuple[str, torch.Tensor]], scales: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if name in scales and tensor.dtype.is_floating_point:
            rounded, scale = quantize.quantized(tensor, "int8")
            yield name, rounded
            yield scales[name], scale
        else:
            yield name, tensor


def _scale_names(managed: ManagedModel) -> dict[str, str]:
    """Checkpoint name of each int8 weight to that of its scales, as the first load showed them."""
    known: dict[torch.dtype, set[str]] = {torch.int8: set(), torch.float32: set()}
    for layer in managed.layers:
        for param in layer.params:
            if param.dtype in known and param.expected is not None:
                known[param.dtype].update(param.expected.names.values())
    return {name: f"{name}_scale" for name in known[torch.int8] if f"{name}_scale" in known[torch.float32]}
