"""Break what the engines' wrappers call, in every process forked from a warm interpreter that has imported this module.

``$MUTANT`` is ``inner`` and the name of a function below; it gets the module that it breaks, as soon as that is imported.
Most act on one call in a row of calls, or on one of the things that a call brings: what is wrong in all of them shows in
more than one way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import wrapt

VARIABLE = "MUTANT"
FP8, EAGLE = "flashpatch.patches.fp8", "flashpatch.patches.eagle"

_MODULES: dict[str, str] = {}
_FUNCTIONS: dict[str, Callable[[Any], None]] = {}


def _breaks(module: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def note(function: Callable[[Any], None]) -> Callable[[Any], None]:
        _MODULES[function.__name__], _FUNCTIONS[function.__name__] = module, function
        return function

    return note


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name``; ``wrapper`` gets the original first."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def names(family: str) -> list[str]:
    """Return the mutants of a family, as ``$MUTANT``."""
    return [f"inner {name}" for name, module in _MODULES.items() if f".{family}." in module]


# -- fp8: buckets -------------------------------------------------------------------------------------------


@_breaks(f"{FP8}.refit.managed_model")
def bucket_lost(module: Any) -> None:
    """The third bucket of an update is read and dropped."""
    calls = [0]

    def load(original: Any, self: Any, weights: Any, names: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            return [name for name, _ in names]
        return original(self, weights, names, **kwargs)

    _around(module.ManagedModel, "_load_bucket", load)


@_breaks(f"{FP8}.refit.managed_model")
def bucket_repeated(module: Any) -> None:
    """In the place of the third bucket the second comes again."""
    calls: list[list[Any]] = []

    def load(original: Any, self: Any, stock: Any, names: Any, **kwargs: Any) -> Any:
        calls.append(list(names))
        return original(self, stock, module.NamedWeights(calls[1 if len(calls) == 3 else -1]), **kwargs)

    _around(module.ManagedModel, "_load_bucket", load)


@_breaks(f"{FP8}.refit.managed_model")
def values_of_another(module: Any) -> None:
    """Two tensors of one shape, which came in one bucket, have changed places."""

    def load(original: Any, self: Any, stock: Any, names: Any, **kwargs: Any) -> Any:
        came = list(names)
        pairs = [
            (i, j) for i, (_, a) in enumerate(came) for j, (_, b) in enumerate(came[:i]) if a.shape == b.shape
        ]
        for i, j in pairs[:1]:
            came[i], came[j] = (came[i][0], came[j][1]), (came[j][0], came[i][1])
        return original(self, stock, module.NamedWeights(came), **kwargs)

    _around(module.ManagedModel, "_load_bucket", load)


@_breaks(f"{FP8}.refit.managed_model")
def one_value_wrong(module: Any) -> None:
    """One row of one tensor of each bucket is the row before."""

    def load(original: Any, self: Any, stock: Any, names: Any, **kwargs: Any) -> Any:
        came = [(name, tensor.clone()) for name, tensor in names]
        for _, tensor in came[:1]:
            tensor[-1] = tensor[0]
        return original(self, stock, module.NamedWeights(came), **kwargs)

    _around(module.ManagedModel, "_load_bucket", load)


# -- fp8: commit --------------------------------------------------------------------------------------------


@_breaks(f"{FP8}.refit.fold")
def fold_of_nothing(module: Any) -> None:
    """What was processed afresh is not written into the live layer."""
    module.Plan.apply = lambda self, *args, **kwargs: []


@_breaks(f"{FP8}.refit.managed_model")
def other_storage(module: Any) -> None:
    """After an update each parameter lies at another address, with the right values."""

    def finish(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for parameter in self._model.parameters():
            parameter.data = parameter.data.clone()
        return result

    _around(module.ManagedModel, "_finish", finish)


@_breaks(f"{FP8}.vllm.scheduler_gate")
def version_ahead(module: Any) -> None:
    """The engine is told a version more than it runs on."""
    _around(
        module.SchedulerGate,
        "_tell",
        lambda original, self, core, version: original(self, core, version + 1),
    )


@_breaks(f"{FP8}.vllm.scheduler_gate")
def version_kept(module: Any) -> None:
    """The engine is told the first update alone."""
    _around(
        module.SchedulerGate,
        "_tell",
        lambda original, self, core, version: original(self, core, version) if version == 1 else None,
    )


@_breaks(f"{FP8}.vllm.caches")
def cache_kept(module: Any) -> None:
    """What was cached under the old policy answers for the new one."""
    module.adopt = lambda *args, **kwargs: None


# -- eagle: capture -----------------------------------------------------------------------------------------


def _step(change: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> Callable[[Any], None]:
    def on_module(module: Any) -> None:
        def step(original: Any, self: Any, requests: Any, lengths: Any, ids: Any, positions: Any, hidden: Any,
                 *rest: Any) -> Any:  # fmt: skip
            return original(self, requests, lengths, *change(ids, positions, hidden), *rest)

        _around(module.Recorder, "step", step)

    return on_module


@_breaks(f"{EAGLE}.capture.recorder")
def states_of_the_row_before(module: Any) -> None:
    """Each position has the state of another."""
    _step(lambda ids, positions, hidden: (ids, positions, hidden.roll(1, 0)))(module)


@_breaks(f"{EAGLE}.capture.recorder")
def positions_ahead(module: Any) -> None:
    """Each state lies one position further on."""
    _step(lambda ids, positions, hidden: (ids, positions + 1, hidden))(module)


@_breaks(f"{EAGLE}.capture.recorder")
def states_scaled(module: Any) -> None:
    """States are one part in a thousand too large."""
    _step(lambda ids, positions, hidden: (ids, positions, hidden * 1.001))(module)


@_breaks(f"{EAGLE}.capture.recorder")
def every_second_step(module: Any) -> None:
    """Half of the steps are counted and not captured."""
    calls = [0]

    def step(original: Any, self: Any, *args: Any) -> Any:
        calls[0] += 1
        return original(self, *args) if calls[0] % 2 else None

    _around(module.Recorder, "step", step)


# -- eagle: the bandit and the drafter ----------------------------------------------------------------------


@_breaks(f"{EAGLE}.vllm.spec_controller")
def always_one_arm(module: Any) -> None:
    """The bandit is asked, and not followed."""
    module.SpecController.choose = lambda self, batch_size: self._arms[self.max_drafts]


@_breaks(f"{EAGLE}.vllm.spec_controller")
def nothing_learned(module: Any) -> None:
    """Steps are counted, and the bandit does not hear of them."""

    def made(original: Any, *args: Any) -> Any:
        policy = original(*args)
        policy.update = lambda *args, **kwargs: None
        return policy

    _around(module, "make_policy", made)


@_breaks(f"{EAGLE}.vllm.drafter_weights")
def drafter_not_loaded(module: Any) -> None:
    """An update of the drafter is read, checked and dropped."""
    module._load = lambda *args: None


@_breaks(f"{EAGLE}.drafter_refit.versions")
def drafter_version_ahead(module: Any) -> None:
    """An update is recorded under a version more than it has."""
    _around(
        module.DrafterVersions,
        "record_update",
        lambda original, self, weights: original(self, weights._replace(version=weights.version + 1)),
    )


@_breaks(f"{EAGLE}.vllm.drafter_refit")
def rollback_of_nothing(module: Any) -> None:
    """A rollback is recorded, and the worse drafter goes on drafting."""
    module.DrafterRefit._load_now = lambda self, weights, then: then()


@_breaks(f"{EAGLE}.drafter_refit.acceptance_check")
def never_worse(module: Any) -> None:
    """No drafter is judged worse than the one before."""
    module.AcceptanceCheck._is_less = lambda self, after, before: False


def _arm(name: str) -> None:
    """Break the module if this process's mutant is ``name``; the variable is read when the module is imported."""

    def broken(module: Any) -> None:
        if os.environ.get(VARIABLE) == f"inner {name}":
            _FUNCTIONS[name](module)

    wrapt.register_post_import_hook(broken, _MODULES[name])


for _name in _FUNCTIONS:
    _arm(_name)
