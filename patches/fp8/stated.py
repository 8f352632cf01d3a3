"""State begin and end of an update to the models of one process, as functions of theirs that send a policy do, and `update`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.refit import update_events
from flashpatch.patches.fp8.refit.errors import update_error

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.managed_model import ManagedModel

_versions: weakref.WeakKeyDictionary[ManagedModel, int] = (
    weakref.WeakKeyDictionary()
)  # when their updates began


@contextmanager
def update(models: Sequence[ManagedModel]) -> Iterator[None]:
    """Make one update of what comes within; after an exception give it up.

    Raises:
        PatchError: see `begin` and `finish`.
    """
    with ending(models):
        begin(models)
        yield


@contextmanager
def ending(models: Sequence[ManagedModel], last: bool = True) -> Iterator[None]:
    """At the end of what is within finish the update that has begun there or before, if this is its ``last`` part."""
    try:
        yield
        if last:
            finish(models)
    except BaseException as error:
        abandon(models, f"its sender failed: {type(error).__name__}: {error}")
        raise


@contextmanager
def part(models: Sequence[ManagedModel], last: bool = False) -> Iterator[None]:
    """Take what comes within as a part of an update: of a new one, if none that was stated is open."""
    with ending(models, last):
        targets = [model for model in models if model.adapter.role == "target"]
        if not all(model.state == "open" and model in _versions for model in targets):
            begin(models)
        yield


def begin(models: Sequence[ManagedModel]) -> None:
    """Open an update of each model, but of drafters that take none.

    Raises:
        PatchError: a target cannot be updated, or not now.
    """
    for model in models:
        _versions[model] = model.version
        with suppress(PatchError) if model.adapter.role == "drafter" else nullcontext():
            model.begin()


def finish(models: Sequence[ManagedModel]) -> None:
    """Commit what has come since `begin`; a drafter may have got nothing.

    Raises:
        PatchError: it is not one whole policy; or it has failed since, and its sender went on.
    """
    for model in models:
        failed = model.state != "open" and model.version == _versions.pop(model, None)
        try:
            if model.adapter.role == "drafter" and (failed or model.close_if_empty()):
                continue
            model.finish()
        finally:
            update_events.note(model)
        if failed:
            raise update_error("the update had failed before its end", "Send a complete update.")


def abandon(models: Sequence[ManagedModel], why: str) -> None:
    """Give up what has come since `begin`, if it has not been committed."""
    for model in models:
        _versions.pop(model, None)
        model.abandon(f"the update was given up, {why}")
        update_events.note(model)
