"""Record what modules of a model are given and return during one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Call:
    """What one module was given and returned.

    Attributes:
        name: of the module in its model.
        given: first tensor of the arguments, [T, ...], summed with the residual if there is one: float32 on the host, or ids.
        returned: first tensor of what was returned, [T, ...], float32 on the host.
    """

    name: str
    given: torch.Tensor
    returned: torch.Tensor


@contextmanager
def recorded(model: torch.nn.Module) -> Iterator[list[Call]]:
    """Within, append each call of a module of ``model`` to the list yielded, in the order in which they begin."""
    calls: list[Call] = []
    places: list[int] = []

    def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        places.append(len(calls))
        given = _host(_sum(tensors_in((*args, *kwargs.values()))))
        calls.append(Call(names[id(module)], given, torch.empty(0)))

    def after(module: torch.nn.Module, args: tuple, kwargs: dict, returned: Any) -> None:
        place = places.pop()
        calls[place] = Call(calls[place].name, calls[place].given, _host(first_tensor(returned)))

    names = {id(module): name for name, module in model.named_modules() if name}
    hooks = []
    for module in model.modules():
        if id(module) in names:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors of a flat sequence that hold tokens' values: floating point, or ids."""
    return [value for value in values if isinstance(value, torch.Tensor) and value.numel()]


def first_tensor(returned: Any) -> torch.Tensor:
    """Return the first tensor of what a module returned, an empty one if there is none."""
    if isinstance(returned, torch.Tensor):
        return returned
    found = tensors_in(returned) if isinstance(returned, (list, tuple)) else []
    return found[0] if found else torch.empty(0)


def _sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A fused norm is given the stream in two parts, its values and its residual."""
    wide = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not wide:
        return tensors[0] if tensors else torch.empty(0)
    if len(wide) == 2 and wide[0].shape == wide[1].shape:
        return wide[0].float() + wide[1].float()
    return wide[0]


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, without the batch's dimension where there is one."""
    detached = tensor.detach()
    if detached.dim() > 1 and detached.shape[0] == 1:
        detached = detached[0]
    return (detached.float() if detached.is_floating_point() else detached).cpu().clone()
