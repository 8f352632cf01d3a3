"""int8 models take the trainer's wide weights: each is rounded on its way in, as its checkpoint was made.

A row (output channel) has a scale of its own, so a shard of a fused layer is rounded by itself, and the sender
needs no second copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from flashpatch.patches.fp8.precision import quantize
from flashpatch.patches.fp8.refit.managed_model import ManagedModel


def accepting(owner: ManagedModel, load_weights: Callable) -> Callable:
    """``load_weights`` that also takes floating tensors for int8 parameters with a ``weight_scale``."""

    def load(weights: Iterable[tuple[str, torch.Tensor]], *args, **kwargs):
        if owner.state != "loading":
            weights = _rounded(weights, _scales(owner))
        return load_weights(weights, *args, **kwargs)

    return load


def _rounded(
    weights: Iterable[tuple[str, torch.Tensor]], scales: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if name in scales and tensor.dtype.is_floating_point:
            rounded, scale = quantize.quantized(tensor, "int8")
            yield name, rounded
            yield scales[name], scale
        else:
            yield name, tensor


def _scales(owner: ManagedModel) -> dict[str, str]:
    """Checkpoint name of each int8 weight to that of its scales, as the first load taught them."""
    taught: dict[torch.dtype, set[str]] = {torch.int8: set(), torch.float32: set()}
    for layer in owner.layers:
        for slot in layer.slots:
            if slot.dtype in taught and slot.expected is not None:
                taught[slot.dtype].update(slot.expected.names.values())
    return {name: f"{name}_scale" for name in taught[torch.int8] if f"{name}_scale" in taught[torch.float32]}
