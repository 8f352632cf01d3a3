"""Follow an update session: what must hold at its begin and its end, on whichever generation of SGLang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashpatch.patches.fp8.sglang import receipts, weight_updater

if TYPE_CHECKING:
    from flashpatch.patches.fp8.refit.managed_model import ManagedModel

AGAIN = "end the update again"
"""In an answer that leaves the session open."""

_NOTHING = (
    "[flashpatch: fp8.sglang.end_weight_update] the session brought no weights through the model's loader. "
    "Weights written straight into memory (P2P, RDMA) bypass quantization: send them as tensors."
)
_NOT_FLUSHED = "the new weights are in place, but the old cache could not be flushed: requests are running"


@dataclass(frozen=True)
class Outcome:
    """What became of a session.

    Attributes:
        done: the update is committed, and the cache of the old policy is flushed.
        message: for the sender.
        open: the session goes on.
        committed: the new weights are in place.
    """

    done: bool
    message: str
    open: bool = False
    committed: bool = False


def begin(sync: str, owners: Sequence[ManagedModel], do: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    """Open the models' updates by ``do``; after a refusal none is open.

    Args:
        sync: the sender's id of the session, or empty.
        owners: the models that it updates.
        do: opens them, and answers.
    """
    weight_updater.failures.clear()
    receipt = receipts.begin(sync, owners)
    with receipt.processing():
        done, message = weight_updater.exception_as_answer(do)
    if not done:
        for owner in owners:
            owner.close_if_empty()
        receipts.end(False)
    return done, message


def end(
    owners: Sequence[ManagedModel],
    do: Callable[[], tuple[bool, str]],
    idle: bool,
    flush: Callable[[], bool],
    gather: Callable[[dict[str, Any] | None], str],
    rank: tuple[int, int, str | None],
) -> Outcome:
    """Commit every written model by ``do``, then flush the old policy's cache.

    Args:
        owners: the models of the session.
        do: commits, and answers.
        idle: whether no request holds anything computed.
        flush: flushes the cache; False if it could not.
        gather: returns all ranks' receipts as text; every rank calls it.
        rank: this rank, the number of ranks, the engine's quantization.
    """
    waits = None if idle else "requests are running; wait for them"
    if any(owner.asleep for owner in owners):
        waits = "the memory of the weights is released; resume it"
    if waits is not None:
        return Outcome(False, f"{waits} and {AGAIN}", open=True)
    empty = [owner.close_if_empty() for owner in owners]  # a selected drafter may have received nothing
    if all(empty) and not weight_updater.failures:
        receipts.end(False)
        return Outcome(False, _NOTHING)
    versions, receipt = [owner.version for owner in owners], receipts.current()
    if receipt is None:
        return Outcome(False, "no update is open")
    with receipt.processing():
        done, message = weight_updater.exception_as_answer(do)
        committed = versions != [owner.version for owner in owners]
        if committed:
            done, message = (done, message) if flush() else (False, _NOT_FLUSHED)
        elif weight_updater.failures:
            done, message = False, weight_updater.failures[0]
    if receipt.sync:
        message += gather(receipt.of_this_rank(*rank) if done else None)
    receipts.end(done)
    return Outcome(done, message, committed=committed)


def flushed(done: bool, message: str, flush: Callable[[], bool]) -> tuple[bool, str]:
    """Flush after a commit outside of a session; return the answer."""
    return (done, message) if flush() else (False, _NOT_FLUSHED)
