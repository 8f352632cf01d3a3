"""Register the models of this process whose weights FlashPatch updates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from flashpatch.patches.fp8.update import events

if TYPE_CHECKING:
    import torch

    from flashpatch.patches.fp8.update.checks import WideWeights
    from flashpatch.patches.fp8.update.model import ManagedModel

    _Entry = tuple[Callable[[], ManagedModel | None], Callable[[], Any]]  # a model, and what owns it

# A managed model refers to its model, so only the model itself (by its load_weights) may hold it.
_models: weakref.WeakKeyDictionary[torch.nn.Module, _Entry] = weakref.WeakKeyDictionary()
_known: list[_Entry] = []  # the same, to be gone through several times a step
_constructing: list[weakref.ref[Any]] = []


def add(model: torch.nn.Module, managed: ManagedModel) -> None:
    """Register ``model``: from now on its ``load_weights`` is part of an update."""
    original = model.load_weights
    _models[model] = weakref.ref(managed), constructing_runner()
    _known[:] = _models.values()
    model.load_weights = _managed_load(managed, original)


def get(model: torch.nn.Module) -> ManagedModel | None:
    """Return the managed model of ``model``, also of what vLLM wraps around it for CUDA graphs and micro-batches; None if
    it is not registered."""
    while hasattr(type(model), "unwrap"):
        model = model.unwrap()
    return _models[model][0]() if model in _models else None


@contextmanager
def owned_by(runner: Any) -> Iterator[None]:
    """Within, models that are added belong to this model runner: a process may hold several engines."""
    _constructing.append(weakref.ref(runner))
    try:
        yield
    finally:
        _constructing.pop()


def constructing_runner() -> Callable[[], Any]:
    """Return a reference to the model runner that is loading now; it gives None if there is none."""
    return _constructing[-1] if _constructing else lambda: None


def all_models(runner: Any = None) -> list[ManagedModel]:
    """Return the managed models that are alive; ``runner``: without those of another model runner, closed ones included."""
    found = []
    for reference, owner in _known:
        if runner is None or not isinstance(owner, weakref.ref) or owner() is runner:
            found.append(reference())
    return [managed for managed in found if managed is not None]


def targets() -> list[ManagedModel]:
    """Return the managed models that are policies."""
    return [managed for managed in all_models() if managed.adapter.role == "target"]


def owner(model: torch.nn.Module) -> Any:
    """Return the model runner that ``model`` belongs to, None if it is not known."""
    return _models[model][1]() if model in _models else None


# The next five are asked in every step, with the models of one runner: lists, since each item of a generator is a call.
def change_count(models: Sequence[ManagedModel]) -> int:
    """Return another number after every change of state of any of ``models``."""
    return max([model.changes for model in models], default=0)


def changed_since(models: Sequence[ManagedModel], count: int) -> bool:
    """Whether a model changed since `change_count` gave ``count``, or has an update open that may end with the next step: a
    tensor of it that came since does not change the state."""
    return max([model.changes for model in models], default=0) != count or "open" in [m.state for m in models]


def version(models: Sequence[ManagedModel]) -> int:
    """Return the version of the policy that ``models`` hold, 0 before the first update."""
    return max([model.version for model in models if model.adapter.role == "target"], default=0)


def in_use(models: Sequence[ManagedModel]) -> AbstractContextManager:
    """Within, no update of any of ``models`` goes on in another thread."""
    if len(models) == 1:
        return models[0].turns.step
    with ExitStack() as stack:
        for managed in models:
            stack.enter_context(managed.turns.step)
        return stack.pop_all()


def restore_load_weights() -> None:
    """Give every model its own ``load_weights`` back, and forget them."""
    for model in list(_models):
        vars(model).pop("load_weights", None)
        if (managed := get(model)) is not None:
            managed.remove_hooks()
    _models.clear()
    _known.clear()


def end_first_loads(runner: Any = None) -> None:
    """End the first load of every model of a model runner; models may have come to share modules since."""
    for managed in all_models(runner):
        managed.end_first_load()
        managed.find_lent_layers()


def first_unservable(models: Sequence[ManagedModel]) -> ManagedModel | None:
    """Commit complete updates that have no end of their own; return a target that may not generate, or None.

    A drafter's weights decide how many tokens a step yields, never which."""
    for managed in models:
        if managed.state != "ready" and not managed.adapter.consensus.stages:
            managed.before_request()
        if managed.adapter.role == "target" and not managed.may_generate:
            return managed
    return None


def report_failed_call(call: int, error: str) -> None:
    """Report to the other ranks that a call from the engine core failed on this one."""
    for managed in all_models():
        managed.adapter.consensus.announce_failed_call(call, error)


def _managed_load(managed: ManagedModel, original: Callable) -> Callable:
    def load_weights(weights, *args, **kwargs):
        """Load a bucket of weights as part of an update; ``partial=True`` also commits it."""
        result = managed.load(lambda bucket, **more: original(bucket, *args, **more), weights, **kwargs)
        events.note(managed)
        return result

    return load_weights


def wide_names(found: Iterable[WideWeights]) -> list[str] | None:
    """Return the names of all of some models, for a receipt; None if it cannot be told of one."""
    names = [one.names for one in found]
    return None if None in names else sorted(set().union(*(each or () for each in names)))
