"""Measure how far rounding alone takes each module: the bound for what may be called a difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FP8_LARGEST = 448.0


@contextmanager
def rounded(model: torch.nn.Module, quantization: str) -> Iterator[None]:
    """Within, linear layers but the head compute on weights and inputs rounded to eight bits, as an engine's do; experts on weights.

    Args:
        model: its weights are restored at the end.
        quantization: the engine's; "" rounds nothing.
    """
    if not quantization:
        yield
        return
    is_int = "int8" in quantization or "w8a8" in quantization or "compressed" in quantization
    hooks, kept = [], []
    for name, module in model.named_modules():
        for own in module.parameters(recurse=False) if name.endswith("experts") else ():
            kept.append((own, own.data))
            own.data = to_eight_bits(own.data, is_int) if own.dim() == 3 else own.data
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            kept.append((module.weight, module.weight.data))
            module.weight.data = to_eight_bits(module.weight.data, is_int)
            hooks.append(
                module.register_forward_pre_hook(lambda _, args: (to_eight_bits(args[0], is_int), *args[1:]))
            )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for weight, data in kept:
            weight.data = data


def to_eight_bits(values: torch.Tensor, is_int: bool) -> torch.Tensor:
    """Return the values rounded to int8 or e4m3, with a scale per row."""
    wide = values.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    if is_int:
        return ((wide * 127 / largest).round() * largest / 127).to(values.dtype)
    return ((wide * FP8_LARGEST / largest).to(torch.float8_e4m3fn).float() * largest / FP8_LARGEST).to(
        values.dtype
    )
