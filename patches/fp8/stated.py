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

# when their updates began, and who has begun the last one: a word that no other sender says, and `changes` of then
_versions: weakref.WeakKeyDictionary[ManagedModel, int] = weakref.WeakKeyDictionary()
_senders: weakref.WeakKeyDictionary[ManagedModel, tuple[str, int]] = weakref.WeakKeyDictionary()


@contextmanager
def update(models: Sequence[ManagedModel], sender: str = "") -> Iterator[None]:
    """Make one update of what comes within; after an exception give it up. It raises what `begin` and `finish` do."""
    sender = sender or uuid4().hex
    with ending(models, sender):
        begin(models, sender)
        yield


@contextmanager
def ending(models: Sequence[ManagedModel], sender: str, last: bool = True) -> Iterator[None]:
    """At the end of what is within finish the update that has begun there or before, if this is its ``last`` part."""
    try:
        yield
        if last:
            finish(models, sender)
    except BaseException as error:
        abandon(models, f"its sender failed: {type(error).__name__}: {error}", sender)
        raise


@contextmanager
def part(models: Sequence[ManagedModel], sender: str, last: bool = False, name: str = "") -> Iterator[None]:
    """Take what comes within, a tensor of this ``name`` alone if it has one, as a part of the sender's update: of a new one, if
    none of its own is open, or if that has brought the name: a sender that sends each once has died in it."""
    with ending(models, sender, last):
        targets = [model for model in models if model.adapter.role == "target"]
        is_open = all(one.state == "open" and _senders.get(one) == (sender, one.changes) for one in targets)
        if not is_open or any(model.has_come(name) for model in targets):
            failed = [model.boundaries for model in models if model.boundaries.failed]
            begin(models, sender)
            for one in failed:  # what comes may be the rest of that
                one.failed = one.rest = True
        yield


def begin(models: Sequence[ManagedModel], sender: str) -> None:
    """Open an update of each model, but of drafters that take none.

    Raises:
        PatchError: a target cannot be updated, or not now."""
    for model in models:
        with suppress(PatchError) if model.adapter.role == "drafter" else nullcontext():
            model.begin()
            _versions[model] = model.version
        _senders[model] = sender, model.changes  # the second changes too if another door begins


def finish(models: Sequence[ManagedModel], sender: str) -> None:
    """Commit what has come since `begin`; a drafter may have got nothing.

    Raises:
        PatchError: it is not one whole policy; or it has failed since, and its sender went on; or another sender has begun one."""
    if _of_another(models, sender):
        problem = "another update began before the end of this one, or after a call of it had failed"
        raise update_error(problem, "Send one update at a time, and a whole one after an error.")
    lost = False
    for model in models:
        began, drafter = _versions.pop(model, None), model.adapter.role == "drafter"
        failed = model.state != "open" and model.version == began
        try:
            if drafter and (began is None or failed or model.close_if_empty()):
                lost |= failed and model.boundaries.failed
                continue
            model.finish()
        finally:
            events.note(model)
    if lost:
        problem = "the policy is in place, and the drafter's part of the update had failed before its end"
        raise update_error(problem, "Send the drafter's weights again, whole.")


def abandon(models: Sequence[ManagedModel], why: str, sender: str = "") -> None:
    """Give up what has come since `begin`, if it has not been committed and is not of another ``sender``."""
    for model in () if sender and _of_another(models, sender) else models:
        _versions.pop(model, None)
        model.abandon(f"the update was given up, {why}")
        events.note(model)


def _of_another(models: Sequence[ManagedModel], sender: str) -> bool:
    """Whether another sender, or door, has begun an update of the policy since this sender's last one."""
    targets = [model for model in models if model.adapter.role == "target"] or models
    return any([_taken(one, sender) for one in targets if one in _senders])


def _taken(model: ManagedModel, sender: str) -> bool:
    by, number = _senders[model]
    if model.state == "open":
        return by != sender or model.changes != number
    return by != sender or (model.version != _versions.get(model, model.version) and model.closed != number)
