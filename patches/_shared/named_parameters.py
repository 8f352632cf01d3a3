"""List a module's parameters in one walk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

LISTING = "named_parameters"


@contextmanager
def listed_at_once(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within, list the parameters of these modules in one walk; torch's compiler wants a module's own afterwards."""
    stock = torch.nn.Module.named_parameters
    own = [one for one in modules if type(one).named_parameters is stock and LISTING not in one.__dict__]
    for one in own:
        one.__dict__[LISTING] = NamedParameters(one)
    try:
        yield
    finally:
        for one in own:
            one.__dict__.pop(LISTING, None)


class NamedParameters:
    """Stand in for ``named_parameters`` of a module, which loaders ask in each call, for each bucket.

    Torch's own asks one generator after another for each module below; this walks in one. Nothing is remembered."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __call__(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return what torch's own yields, in its order."""
        found, listed, walked, stack = [], set(), set(), [(prefix, self._module)]
        while stack:
            path, module = stack.pop()
            if module is None or module in walked:
                continue
            # a module that walks in a way of its own is asked
            if getattr(module.named_modules, "__func__", None) is not torch.nn.Module.named_modules:
                return torch.nn.Module.named_parameters(self._module, prefix, recurse, remove_duplicate)
            start = f"{path}." if path else ""
            for key, param in module._parameters.items():
                if param is not None and id(param) not in listed:
                    found.append((start + key, param))
                    if remove_duplicate:
                        listed.add(id(param))
            if recurse:
                if remove_duplicate:
                    walked.add(module)
                stack += [(start + key, below) for key, below in reversed(module._modules.items())]
        return iter(found)
