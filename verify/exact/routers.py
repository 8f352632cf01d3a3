"""Let routers of the trainer's model choose experts by what an engine's returned, and an engine's each expert in turn.

Two experts that are equally likely but for rounding are chosen either way, and what they compute has nothing in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

ROUTER = re.compile(r"\.(gate|router)$")
_LEAN = 2.0**-9  # less than between two numbers in bf16


@contextmanager
def hooked(hooks: Iterable[Any]) -> Iterator[None]:
    """Within, these hooks of modules act."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_router(name: str, returned: Any) -> bool:
    """Return whether the module ``name`` chooses experts itself: it returns their numbers beside its logits."""
    return bool(ROUTER.search(name)) and isinstance(returned, tuple)


def logits_of(returned: tuple) -> torch.Tensor:
    """Return the logits of all experts among what a router returned, the widest of its tensors."""
    wide = [value for value in returned if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return max(wide, key=torch.Tensor.numel, default=torch.empty(0))


def following(router: torch.nn.Module, args: tuple, kwargs: dict, logits: torch.Tensor) -> Any:
    """Return what a router returns that has these logits, [T, E], in place of those it computes."""
    with _Given(logits):
        return router.forward(*args, **kwargs)


@contextmanager
def choosing(model: torch.nn.Module, logits: Mapping[str, torch.Tensor], later: bool) -> Iterator[None]:
    """Within, routers choose by these logits, by name, and of experts with the same the first, or the last if ``later``."""

    def hook(mine: torch.Tensor) -> Any:
        ranks = torch.arange(mine.shape[-1]) / mine.shape[-1]
        leaning = mine + mine.abs() * _LEAN * (ranks if later else 1 - ranks)

        def after(module: torch.nn.Module, args: tuple, kwargs: dict, returned: Any) -> Any:
            if isinstance(returned, tuple):
                return following(module, args, kwargs, leaning)
            fits = returned.numel() == leaning.numel()
            return leaning.reshape(returned.shape).to(returned) if fits else None

        return after

    hooks = [
        model.get_submodule(name).register_forward_hook(hook(mine), with_kwargs=True)
        for name, mine in logits.items()
    ]
    with hooked(hooks):
        yield


def in_turn(count: int, begin: int, experts: int) -> torch.Tensor:
    """Return logits [count, experts] by which token ``begin`` + n of a sequence takes expert n, modulo their number, before others."""
    far = (torch.arange(experts) - torch.arange(begin, begin + count)[:, None]) % experts
    return torch.where(far == 0, 4.0, -6 - far / 8)


@contextmanager
def taking_turns(model: torch.nn.Module) -> Iterator[None]:
    """Within, routers of an engine's model return logits with which each expert is taken: see `in_turn`."""

    def hook() -> Any:
        seen = 0

        def after(_: torch.nn.Module, args: tuple, kwargs: dict, returned: Any) -> Any:
            nonlocal seen
            logits = logits_of(returned if isinstance(returned, tuple) else (returned,))
            if logits.dim() != 2:
                return None
            turns = in_turn(len(logits), seen, logits.shape[1]).to(logits)
            seen += len(logits)
            if not isinstance(returned, tuple):
                return turns
            return tuple(turns if value is logits else value for value in returned)

        return after

    routers = [module for name, module in model.named_modules() if ROUTER.search(name)]
    with hooked([router.register_forward_hook(hook(), with_kwargs=True) for router in routers]):
        yield


def turns(logits: torch.Tensor, returned: tuple) -> torch.Tensor:
    """Return which expert's turn each token is, [T]; -1 if a router did not take it, or may have taken another."""
    expert = torch.arange(len(logits)) % logits.shape[-1]
    chosen = _chosen(logits, returned)
    took = torch.ones(len(logits), dtype=torch.bool) if chosen is None else (chosen == expert[:, None]).any(1)
    return torch.where(took & decided(logits, returned), expert, -1)


def decided(logits: torch.Tensor, returned: tuple) -> torch.Tensor:
    """Return for which tokens, [T], no expert that was not chosen has the same logit as one that was; for others an engine may
    have taken either."""
    chosen = _chosen(logits, returned)
    if chosen is None:  # elsewhere
        return torch.ones(len(logits), dtype=torch.bool)
    left = torch.ones_like(logits, dtype=torch.bool).scatter(1, chosen, False)
    alike = logits.gather(1, chosen)[:, :, None] == logits[:, None, :]
    return ~(alike & left[:, None, :]).any(-1).any(-1)


def _chosen(logits: torch.Tensor, returned: tuple) -> torch.Tensor | None:
    whole = [part for part in returned if isinstance(part, torch.Tensor) and not part.is_floating_point()]
    return next((part.cpu() for part in whole if part.shape[:-1] == logits.shape[:1]), None)


class _Given(TorchFunctionMode):
    """Within, a linear layer that computes as many values as ``logits`` returns those."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not linear or found.numel() != self.logits.numel():
            return found
        return self.logits.reshape(found.shape).to(found)
