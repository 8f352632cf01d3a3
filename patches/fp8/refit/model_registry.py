"""The models of this process whose weights FlashPatch looks after."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from flashpatch import ledger

if TYPE_CHECKING:
    import torch

    from flashpatch.patches.fp8.refit.managed_model import ManagedModel

# A managed model refers to its model, so only the model itself (by its load_weights) may hold it.
_models: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[ManagedModel]] = weakref.WeakKeyDictionary()


def add(model: torch.nn.Module, managed: ManagedModel) -> None:
    """Look after ``model``: from now on its ``load_weights`` belongs to the transaction."""
    original = model.load_weights
    _models[model] = weakref.ref(managed)
    model.load_weights = _shadow(managed, original)


def get(model: torch.nn.Module) -> ManagedModel | None:
    return _models.get(model, lambda: None)()


def all_models() -> list[ManagedModel]:
    return [managed for reference in list(_models.values()) if (managed := reference()) is not None]


def changes() -> int:
    """Another number after every change of state of any model, though models come and go."""
    return max((model.changes for model in all_models()), default=0)


def release() -> None:
    """Give every model its own ``load_weights`` back."""
    for model in list(_models):
        vars(model).pop("load_weights", None)
    _models.clear()


def seal() -> None:
    """The first loads are over."""
    for managed in all_models():
        managed.sealed()


def unusable() -> ManagedModel | None:
    """A model that may not generate, after complete but unfinished updates have been committed."""
    for managed in all_models():
        if managed.state != "ready":
            managed.settle()
        if not managed.may_generate:
            return managed
    return None


def _shadow(managed: ManagedModel, original: Callable) -> Callable:
    def load_weights(weights, *args, **kwargs):
        """Load a bucket of weights as part of an update; ``partial=True`` also commits it."""
        result = managed.load(original, weights, *args, **kwargs)
        ledger.note(policy_version=managed.version, updates=managed.version, policy_state=managed.state)
        return result

    return load_weights
