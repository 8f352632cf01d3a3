"""Record what modules of a model are given and return during one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashpatch.verify.exact.routers import hooked, is_router, logits_of


@dataclass(frozen=True)
class Call:
    """What one module was given and returned.

    Attributes:
        name: of the module in its model, "" of that itself.
        given: first tensor of the arguments, [T, ...], of a norm summed with the residual if it is given one: float32 on the
            host, or ids.
        returned: first tensor of what was returned, a router's logits, [T, ...], float32 on the host.
        parts: how many tensors of the first one's shape it was given, as values and a gate; a sum is one.
        given_by, returned_by: the rank of each column, None if they are every rank's.
        tokens: what a module that no other called was given: ids and positions, or positions alone, [1 or 2, T]."""

    name: str
    given: torch.Tensor
    returned: torch.Tensor
    parts: int = 1
    given_by: torch.Tensor | None = None
    returned_by: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


Prompts = list[list[int]]
Answered = tuple[list[list[Call]], list[list[int]]]
"""What each rank's modules did with prompts, and what each was answered."""


@contextmanager
def recorded(model: torch.nn.Module) -> Iterator[list[Call]]:
    """Within, append each call of a module of ``model`` to the list yielded, in the order in which they begin."""
    calls: list[Call] = []
    begun: list[tuple[int, list[torch.Tensor]]] = []  # places, and the two parts of a sum

    def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        every = () if begun else tensors_in((*args, *kwargs.values()))
        whole = [one for one in every if not one.is_floating_point()]
        begun.append((len(calls), [_host(part) for part in _added(module, args, kwargs)]))
        given, parts = given_to(module, args, kwargs)
        calls.append(Call(names[id(module)], _host(given), torch.empty(0), parts, tokens=_rows(whole)))

    def after(module: torch.nn.Module, args: tuple, kwargs: dict, returned: Any) -> None:
        place, added = begun.pop()
        routes = is_router(calls[place].name, returned)
        first = logits_of(returned) if routes else first_tensor(returned)
        calls[place] = replace(calls[place], returned=_host(first))
        found = tensors_in(returned) if added and isinstance(returned, (list, tuple)) else []
        # A norm that gave the residual back as it was, as Cohere's does, added nothing to it.
        if len(found) == 2 and added[0].any() and torch.equal(_host(found[1]), added[1]):
            calls[place] = replace(calls[place], given=added[0])

    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    hooks = [one.register_forward_pre_hook(before, with_kwargs=True) for one in modules.values()]
    hooks += [one.register_forward_hook(after, with_kwargs=True) for one in modules.values()]
    with hooked(hooks):
        yield calls


def _rows(whole: list[torch.Tensor]) -> torch.Tensor | None:
    """Ids and positions, of which a model with images may have several per token; None if there are none of as many tokens."""
    rows = [one.reshape(-1, one.shape[-1])[:1].long().cpu() for one in whole[:2] if one.dim()]
    return torch.cat(rows) if len({one.shape for one in rows}) == 1 else None


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors of a flat sequence that hold tokens' values: floating point, or ids."""
    return [value for value in values if isinstance(value, torch.Tensor) and value.numel()]


def given_to(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[torch.Tensor, int]:
    """Return the first tensor that a module is given, and how many it is given of that shape.

    A fused norm is given the stream in two parts, its values and its residual: their sum is what it is given."""
    tensors = tensors_in((*args, *kwargs.values()))
    wide = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not wide:
        return (tensors[0] if tensors else torch.empty(0)), 1
    if added := _added(module, args, kwargs):
        return added[0].float() + added[1].float(), 1
    return wide[0], sum(tensor.shape == wide[0].shape for tensor in wide)


def _added(module: torch.nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The values and the residual that a fused norm is given; none of another module."""
    wide = [tensor for tensor in tensors_in((*args, *kwargs.values())) if tensor.is_floating_point()]
    kind = type(module).__name__
    is_fused = "Norm" in kind and "Gated" not in kind and len(wide) == 2 and wide[0].shape == wide[1].shape
    return wide if is_fused else []


def first_tensor(returned: Any) -> torch.Tensor:
    """Return the first tensor of what a module returned, an empty one if there is none."""
    if isinstance(returned, torch.Tensor):
        return returned
    found = tensors_in(returned) if isinstance(returned, (list, tuple)) else []
    return found[0] if found else torch.empty(0)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, without the batch's dimension where there is one."""
    detached = tensor.detach()
    if detached.dim() > 1 and detached.shape[0] == 1:
        detached = detached[0]
    return (detached.float() if detached.is_floating_point() else detached).cpu().clone()
