"""Register the models of this process whose weights FlashPatch updates."""

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
    """Register ``model``: from now on its ``load_weights`` is part of an update."""
    original = model.load_weights
    _models[model] = weakref.ref(managed)
    model.load_weights = _managed_load(managed, original)


def get(model: torch.nn.Module) -> ManagedModel | None:
    """Return the managed model of ``model``, None where it is not registered."""
    return _models.get(model, lambda: None)()


def all_models() -> list[ManagedModel]:
    """Return all managed models that are alive."""
    return [managed for reference in list(_models.values()) if (managed := reference()) is not None]


def change_count() -> int:
    """Return another number after every change of state of any model, though models come and go."""
    return max((model.changes for model in all_models()), default=0)


def restore_load_weights() -> None:
    """Give every model its own ``load_weights`` back, and forget them."""
    for model in list(_models):
        vars(model).pop("load_weights", None)
    _models.clear()


def end_first_loads() -> None:
    """End the first load of every model."""
    for managed in all_models():
        managed.end_first_load()


def first_unservable() -> ManagedModel | None:
    """Commit complete but unfinished updates; return a model that may not generate, or None."""
    for managed in all_models():
        if managed.state != "ready":
            managed.commit_if_complete()
        if not managed.may_generate:
            return managed
    return None


def _managed_load(managed: ManagedModel, original: Callable) -> Callable:
    def load_weights(weights, *args, **kwargs):
        """Load a bucket of weights as part of an update; ``partial=True`` also commits it."""
        result = managed.load(original, weights, *args, **kwargs)
        ledger.note(policy_version=managed.version, updates=managed.version, policy_state=managed.state)
        return result

    return load_weights
