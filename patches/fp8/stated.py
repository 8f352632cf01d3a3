"""State begin and end of an update to the models of one process, as functions of theirs that send a policy do, and `update`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING
from uuid import uuid4

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.update import events
from flashpatch.patches.fp8.update.events import update_error

if TYPE_CHECKING:
    from flashpatch.patches.fp8.update.model import ManagedModel

# when their updates began, and who has begun them
_versions: weakref.WeakKeyDictionary[ManagedModel, int] = weakref.WeakKeyDictionary()
_senders: weakref.WeakKeyDictionary[ManagedModel, tuple[str, int]] = weakref.WeakKeyDictionary()


@contextmanager
def update(models: Sequence[ManagedModel]) -> Iterator[None]:
    """Make one update of what comes within; after an exception give it up.

    Raises:
        PatchError: see `begin` and `finish`."""
    sender = uuid4().hex
    with ending(models, sender=sender):
        begin(models, sender)
        yield


@contextmanager
def ending(models: Sequence[ManagedModel], last: bool = True, sender: str = "") -> Iterator[None]:
    """At the end of what is within finish the update that has begun there or before, if this is its ``last`` part."""
    try:
        yield
        if last:
            finish(models, sender)
    except BaseException as error:
        abandon(models, f"its sender failed: {type(error).__name__}: {error}", sender)
        raise


@contextmanager
def part(models: Sequence[ManagedModel], last: bool = False, name: str = "") -> Iterator[None]:
    """Take what comes within, a tensor of this ``name`` alone if it has one, as a part of an update: of a new one, if none that
    was stated is open, or if that has brought the name: a sender that sends each once has died in it."""
    with ending(models, last):
        targets = [model for model in models if model.adapter.role == "target"]
        is_open = all(model.state == "open" and model in _versions for model in targets)
        if not is_open or any(model.has_come(name) for model in targets):
            begin(models)
        yield


def begin(models: Sequence[ManagedModel], sender: str = "") -> None:
    """Open an update of each model, but of drafters that take none; ``sender``: who does, in a word that no other one says.

    Raises:
        PatchError: a target cannot be updated, or not now."""
    for model in models:
        _versions[model] = model.version
        with suppress(PatchError) if model.adapter.role == "drafter" else nullcontext():
            model.begin()
        _senders[model] = sender, model.changes  # the second changes too if another door begins


def finish(models: Sequence[ManagedModel], sender: str = "") -> None:
    """Commit what has come since `begin`; a drafter may have got nothing.

    Raises:
        PatchError: it is not one whole policy; or it has failed since, and its sender went on; or another ``sender`` has begun one."""
    if _of_another(models, sender):
        raise update_error("another update began before the end of this one", "Send one update at a time.")
    for model in models:
        failed = model.state != "open" and model.version == _versions.pop(model, None)
        try:
            if model.adapter.role == "drafter" and (failed or model.close_if_empty()):
                continue
            model.finish()
        finally:
            events.note(model)
        if failed:
            raise update_error("the update had failed before its end", "Send a complete update.")


def abandon(models: Sequence[ManagedModel], why: str, sender: str = "") -> None:
    """Give up what has come since `begin`, if it has not been committed and is not of another ``sender``."""
    for model in () if _of_another(models, sender) else models:
        _versions.pop(model, None)
        model.abandon(f"the update was given up, {why}")
        events.note(model)


def _of_another(models: Sequence[ManagedModel], sender: str) -> bool:
    begun = [(model, *_senders.get(model, ("", 0))) for model in models] if sender else []
    return any([by != sender or (one.state == "open" and one.changes != number) for one, by, number in begun])
