"""Break what the engines' wrappers call, in every process forked from a warm interpreter that has imported this module.

``$MUTANT`` is ``inner`` and the name of a function below, which stands in the place that its decorator names as soon as
the module there is imported, and gets what it replaces first. Most act on one call in a row of calls, or on one of the things
that a call brings: what is wrong in all of them shows in more than one way."""

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import wrapt

VARIABLE = "MUTANT"
FP8, EAGLE = "flashpatch.patches.fp8", "flashpatch.patches.eagle"
LOAD = f"{FP8}.update.model:ManagedModel._load_bucket"
TELL = f"{FP8}.vllm.scheduler_gate:SchedulerGate._tell"
STEP = f"{EAGLE}.capture.recorder:Recorder.step"

_PLACES: dict[str, str] = {}
_CALLS = itertools.count(1)
"""Of the mutant, of which a process has one."""


def _breaks(place: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function replace what stands at ``module:qualified.name`` in a process whose mutant it is."""

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        _PLACES[function.__name__] = place
        module, _, path = place.partition(":")

        def put(module: Any) -> None:
            if os.environ.get(VARIABLE) == f"inner {function.__name__}":
                *owners, name = path.split(".")
                owner = functools.reduce(getattr, owners, module)
                original = getattr(owner, name)
                setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))

        wrapt.register_post_import_hook(put, module)
        return function

    return note


def names(family: str) -> list[str]:
    """Return the mutants of a family, as ``$MUTANT``."""
    return [f"inner {name}" for name, place in _PLACES.items() if f".{family}." in place]


def _named(tensors: list[tuple[str, Any]]) -> Any:
    from flashpatch.patches.fp8.update.model import NamedWeights

    return NamedWeights(tensors)


# -- fp8: buckets -------------------------------------------------------------------------------------------


@_breaks(LOAD)
def bucket_lost(load: Any, self: Any, stock: Any, came: Any, **kwargs: Any) -> Any:
    """The third bucket of an update is read and dropped."""
    return [name for name, _ in came] if next(_CALLS) == 3 else load(self, stock, came, **kwargs)


_before: list[tuple[str, Any]] = []


@_breaks(LOAD)
def bucket_repeated(load: Any, self: Any, stock: Any, came: Any, **kwargs: Any) -> Any:
    """In the place of the third bucket the second comes again."""
    now = list(came)
    if next(_CALLS) != 3:
        _before[:] = now
    return load(self, stock, _named(list(_before)), **kwargs)


@_breaks(LOAD)
def values_of_another(load: Any, self: Any, stock: Any, came: Any, **kwargs: Any) -> Any:
    """Two tensors of one shape, which came in one bucket, have changed places."""
    came = list(came)
    pairs = [
        (i, j) for j, i in itertools.combinations(range(len(came)), 2) if came[i][1].shape == came[j][1].shape
    ]
    for i, j in pairs[:1]:
        came[i], came[j] = (came[i][0], came[j][1]), (came[j][0], came[i][1])
    return load(self, stock, _named(came), **kwargs)


@_breaks(LOAD)
def one_value_wrong(load: Any, self: Any, stock: Any, came: Any, **kwargs: Any) -> Any:
    """One row of one tensor of each bucket is the row before."""
    came = [(name, tensor.clone()) for name, tensor in came]
    for _, tensor in came[:1]:
        tensor[-1] = tensor[0]
    return load(self, stock, _named(came), **kwargs)


# -- fp8: commit --------------------------------------------------------------------------------------------


@_breaks(f"{FP8}.update.process:Plan.apply")
def fold_of_nothing(*_: Any, **__: Any) -> list[Any]:
    """What was processed afresh is not written into the live layer."""
    return []


@_breaks(f"{FP8}.update.model:ManagedModel._finish")
def other_storage(finish: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """After an update each parameter lies at another address, with the right values."""
    result = finish(self, *args, **kwargs)
    for parameter in self._model.parameters():
        parameter.data = parameter.data.clone()
    return result


@_breaks(TELL)
def version_ahead(tell: Any, self: Any, core: Any, version: int) -> Any:
    """The engine is told a version more than it runs on."""
    return tell(self, core, version + 1)


@_breaks(TELL)
def version_kept(tell: Any, self: Any, core: Any, version: int) -> Any:
    """The engine is told the first update alone."""
    return tell(self, core, version) if version == 1 else None


@_breaks(f"{FP8}.vllm.caches:adopt")
def cache_kept(*_: Any, **__: Any) -> None:
    """What was cached under the old policy answers for the new one."""


# -- eagle: capture -----------------------------------------------------------------------------------------


@_breaks(STEP)
def states_of_the_row_before(
    step: Any, self: Any, rows: Any, lengths: Any, ids: Any, at: Any, hidden: Any, *rest: Any
) -> Any:
    """Each position has the state of another."""
    return step(self, rows, lengths, ids, at, hidden.roll(1, 0), *rest)


@_breaks(STEP)
def positions_ahead(step: Any, self: Any, rows: Any, lengths: Any, ids: Any, at: Any, *rest: Any) -> Any:
    """Each state lies one position further on."""
    return step(self, rows, lengths, ids, at + 1, *rest)


@_breaks(STEP)
def states_scaled(
    step: Any, self: Any, rows: Any, lengths: Any, ids: Any, at: Any, hidden: Any, *rest: Any
) -> Any:
    """States are one part in a thousand too large."""
    return step(self, rows, lengths, ids, at, hidden * 1.001, *rest)


@_breaks(STEP)
def every_second_step(step: Any, self: Any, *args: Any) -> Any:
    """Half of the steps are counted and not captured."""
    return step(self, *args) if next(_CALLS) % 2 else None


# -- eagle: the bandit and the drafter ----------------------------------------------------------------------


@_breaks(f"{EAGLE}.vllm.spec_controller:SpecController.choose")
def always_one_arm(_: Any, self: Any, batch_size: int) -> Any:
    """The bandit is asked, and not followed."""
    return self._arms[self.max_drafts]


@_breaks(f"{EAGLE}.vllm.spec_controller:make_policy")
def nothing_learned(make: Any, *args: Any) -> Any:
    """Steps are counted, and the bandit does not hear of them."""
    policy = make(*args)
    policy.update = lambda *args, **kwargs: None
    return policy


@_breaks(f"{EAGLE}.vllm.drafter_refit:_load")
def drafter_not_loaded(*_: Any) -> None:
    """An update of the drafter is read, checked and dropped."""


@_breaks(f"{EAGLE}.drafter_refit.versions:DrafterVersions.record_update")
def drafter_version_ahead(record: Any, self: Any, weights: Any) -> Any:
    """An update is recorded under a version more than it has."""
    return record(self, weights._replace(version=weights.version + 1))
