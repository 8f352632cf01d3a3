"""Follow ``load_weights`` of a model's parts, as worker extensions call it for a tower or the inner model alone.

Within ``load_weights`` of the whole model a part's is an ordinary piece of it. Called by itself it is a bucket of an update
of the whole model, which is complete when every other weight has come too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from flashpatch.patches.fp8.refit import update_events

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.managed_model import ManagedModel

NAME = "load_weights"


class PartLoad:
    """Stand in for ``load_weights`` of one part of a managed model.

    It is no function: a walk over a layer's containers stops at FlashPatch's own objects.
    """

    def __init__(self, managed: ManagedModel, path: str, original: Callable[..., Any]) -> None:
        self._managed, self._prefix, self._original = managed, f"{path}.", original

    def __call__(self, weights: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights, named as the part names them: as a piece of a load under way, or as a bucket of an update."""
        managed = self._managed
        if managed.inside_load:
            return self._original(weights, *args, **kwargs)

        # two parts have tensors of one name, which the update must tell apart
        whole = ((self._prefix + name, tensor) for name, tensor in weights)

        def load(weights: Any, **kwargs: Any) -> Any:
            own = ((name.removeprefix(self._prefix), tensor) for name, tensor in weights)
            result = self._original(own, *args, **kwargs)
            # a generator loads when it is read
            return list(result) if isinstance(result, Iterator) else result

        result = managed.load(load, whole, **kwargs)
        update_events.note(managed)
        return result


def install(model: torch.nn.Module, managed: ManagedModel) -> None:
    """Let every part of ``model`` that has ``load_weights`` load through ``managed``."""
    for path, module in _parts(model):
        module.load_weights = PartLoad(managed, path, module.load_weights)


def remove(model: torch.nn.Module) -> None:
    """Give the parts their own ``load_weights`` back."""
    for _, module in _parts(model):
        if isinstance(vars(module).get(NAME), PartLoad):
            del vars(module)[NAME]


def _parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    return ((path, one) for path, one in model.named_modules() if path and callable(getattr(one, NAME, None)))
