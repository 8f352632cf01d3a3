"""Answer the update session of a scheduler: its begin, its end, updates from disk, and SGLang's ``weight_version``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashpatch.decorate import Patches
from flashpatch.patches._shared.context import holding
from flashpatch.patches.fp8 import model_registry, named_update, stated
from flashpatch.patches.fp8.sglang import receipts, schedulers, weight_updater
from flashpatch.patches.fp8.sglang.schedulers import REMOVE_WHEN

if TYPE_CHECKING:
    from flashpatch.patches.fp8.update.model import ManagedModel

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin"

AGAIN = "end the update again"
"""In an answer that leaves the session open."""

_NOTHING = (
    "[flashpatch: fp8.sglang.end_weight_update] the session brought no weights that the model's loader knows, or an update from "
    "disk has replaced them. Send the names of the checkpoint (strip a wrapper's prefix, such as 'module.'), as tensors: what is "
    "written straight into memory (P2P, RDMA) bypasses quantization."
)
_NOT_FLUSHED = "the new weights are in place, but the old cache could not be flushed: requests are running"

# Object that keeps the version in its process, the scheduler's or the tokenizer's, to the version that the open update brings.
_held: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()

_AT_ONCE: ContextVar[bool] = ContextVar("flashpatch_at_once", default=False)
"""Whether this task names what is in place already, not what a session brings."""

patches = Patches("fp8", "sglang>=0.5.21", scope="engine-core", evidence="optional", remove_when=REMOVE_WHEN)


@patches.wrap(
    f"{MANAGER}.begin_weight_update",
    relies_on=("self._session", "self._select_runners"),
    when="called=fp8.sglang.end_weight_update",
    why="A refusal to begin must reach the caller, and the scheduler must live on.",
)
def begin_weight_update(original, self, recv_req: Any):
    """Answer a refusal with success=False and the reason, and leave no session open.

    A sender that numbers its updates begins anew after one that it could not finish."""
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    if self._session is not None and recv_req.rid and receipts.unfinished():
        self._session = None
    owners = owners_of(self, recv_req.selector) if self._session is None else []
    if not owners:
        return original(self, recv_req)
    settle(self, False)
    done, message = begin(recv_req.rid or "", owners, lambda: _answer(original(self, recv_req)))
    if not done:
        self._session = None
    return BeginWeightUpdateReqOutput(success=done, message=message)


def begin(sync: str, owners: Sequence[ManagedModel], do: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    """Open the models' updates by ``do``; after a refusal none is open.

    Args:
        sync: the sender's id of the session, or empty.
        owners: the models that it updates.
        do: opens them, and answers."""
    weight_updater.failures.clear()
    receipt = receipts.begin(sync, owners)
    with receipt.processing():
        done, message = weight_updater.exception_as_answer(do)
    if not done:
        for owner in owners:
            owner.close_if_empty()
        receipts.end(False)
    return done, message


@patches.wrap(
    f"{MANAGER}.end_weight_update",
    relies_on=(
        "self._session",
        "self._session.loaded_weights",
        "self._select_runners",
        f"{schedulers.SCHEDULER}.is_fully_idle",
    ),
    evidence="update",
    when="called=fp8.sglang.begin_weight_update",
    why="An incomplete update must end with an error, and not leave prefixes of the old policy in the cache.",
)
def end_weight_update(original, self, recv_req: Any):
    """Commit every written model, or answer with the names that did not come; flush the cache after a commit."""
    from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput
    from sglang.srt.runtime_context import get_parallel

    owners = owners_of(self, self._session.selector) if self._session is not None else []
    if not owners:
        return original(self, recv_req)
    if recv_req.rid == named_update.ABANDON:
        stated.abandon(owners, "its sender failed")
        self._session = None
        receipts.end(False)
        settle(self, False)
        return EndWeightUpdateReqOutput(success=False, message="the update was given up")
    ranks, quantization = get_parallel(), self.tp_worker.model_runner.model_config.quantization
    outcome = end(
        owners,
        lambda: _answer(original(self, recv_req)),
        idle=schedulers.idle(self.scheduler),
        flush=lambda: schedulers.flush(self.scheduler),
        gather=lambda receipt: receipts.of_all_ranks(receipt, self.tp_cpu_group),
        rank=(ranks.tp_rank, ranks.tp_size, quantization),
    )
    if not outcome.open:
        self._session = None
        settle(self, outcome.committed)
    return EndWeightUpdateReqOutput(success=outcome.done, message=outcome.message)


@dataclass(frozen=True)
class Outcome:
    """What became of a session.

    Attributes:
        done: the update is committed, and the cache of the old policy is flushed.
        message: for the sender.
        open: the session goes on.
        committed: the new weights are in place."""

    done: bool
    message: str
    open: bool = False
    committed: bool = False


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
        rank: this rank, the number of ranks, the engine's quantization."""
    waits = None if idle else "requests are running; wait for them"
    if any(owner.asleep for owner in owners):
        waits = "the memory of the weights is released; resume it"
    if waits is not None:
        return Outcome(False, f"{waits} and {AGAIN}", open=True)
    # a selected drafter may have received nothing, and an update from disk have replaced this one
    empty = [owner.close_if_empty() or owner.state == "ready" for owner in owners]
    if all(empty) and not weight_updater.failures:
        receipts.end(False)
        return Outcome(False, _NOTHING)
    versions, receipt = [owner.version for owner in owners], receipts.current()
    if receipt is None:
        return Outcome(False, "no update is open")
    with receipt.processing():
        done, message = weight_updater.exception_as_answer(do)
        kept = [owner.adapter.role for owner, version in zip(owners, versions) if owner.version == version]
        failed = bool(weight_updater.failures) and "target" in kept  # a drafter may have got its own
        committed = len(kept) < len(owners) and not failed
        if committed:
            done, message = (done, message) if flush() else (False, _NOT_FLUSHED)
        elif weight_updater.failures:
            done, message = False, weight_updater.failures[0]
    if receipt.sync:
        message += gather(receipt.of_this_rank(*rank) if done else None)
    receipts.end(done)
    return Outcome(done, message, committed=committed)


@patches.wrap(
    f"{MANAGER}.update_weights_from_disk",
    relies_on="self._select_runners",
    when="called=fp8.sglang.runner_update_weights_from_disk",
    why="With flush_cache=False prefixes of the old policy stay in the cache.",
)
def scheduler_update_weights_from_disk(original, self, recv_req: Any):
    """Flush the cache after a commit, also with flush_cache=False."""
    owners = owners_of(self, "all")
    versions = [owner.version for owner in owners]
    output = original(self, recv_req)
    if versions != [owner.version for owner in owners]:
        output.success, output.message = flushed(
            output.success, output.message, lambda: schedulers.flush(self.scheduler)
        )
    return output


def flushed(done: bool, message: str, flush: Callable[[], bool]) -> tuple[bool, str]:
    """Flush after a commit outside of a session; return the answer."""
    return (done, message) if flush() else (False, _NOT_FLUSHED)


def owners_of(manager: Any, selector: str) -> list[ManagedModel]:
    """Return the managed models among those a session selects."""
    models = (r.weight_updater.get_model() for _, r in manager._select_runners(selector))
    return [owner for model in models if (owner := model_registry.get(model)) is not None]


def _answer(output: Any) -> tuple[bool, str]:
    return output.success, output.message


# SGLang takes the version that a bucket names as that of the weights in place. Buckets are staged: what answers until
# end_weight_update is the old policy, or nothing.
version_patches = Patches(
    "fp8",
    "sglang>=0.5.21",
    scope="driver",
    evidence="optional",  # an update may come from disk, which has no session
    why="SGLang stamps answers with the version of the first bucket, while the old policy still answers or the update may fail.",
    remove_when="SGLang itself records the version when a session ends.",
)


@version_patches.wrap(
    f"{MANAGER}.record_weight_version_after_update", relies_on="self.scheduler", scope="engine-core"
)
def record_weight_version_after_update(original, self, weight_version: str | None):
    """Hold the version back while an update is open, and record it after the commit."""
    if any(owner.state == "open" for owner in model_registry.all_models()):
        if weight_version is not None:
            _held[self.scheduler] = weight_version
        return
    original(self, weight_version)


def settle(manager: Any, committed: bool) -> None:
    """End the update: record the version that was held back if it was committed, else forget it."""
    version = _held.pop(manager.scheduler, None)
    if committed and version is not None:
        manager.record_weight_version_after_update(version)


@version_patches.wrap(f"{TOKENIZER}._update_weight_version_if_provided")
def update_weight_version_if_provided(original, self, weight_version: str | None):
    """Hold the version back while a session is open."""
    if self not in _held or _AT_ONCE.get():
        return original(self, weight_version)
    if weight_version is not None:
        _held[self] = weight_version


@version_patches.wrap(f"{TOKENIZER}.update_weight_version", id="fp8.sglang.tokenizer_update_weight_version")
@version_patches.wrap("sglang.srt.managers.tokenizer_manager:TokenizerManager.update_weights_from_disk")
async def tokenizer_update_weights_from_disk(original, self, *args: Any, **kwargs: Any):
    """Take a version that waits for no session's end."""
    with holding(_AT_ONCE, True):
        return await original(self, *args, **kwargs)


@version_patches.wrap(f"{TOKENIZER}.begin_weight_update", params="obj")
async def tokenizer_begin_weight_update(original, self, *args: Any, **kwargs: Any):
    """Note that a session is open."""
    done, message = await original(self, *args, **kwargs)
    if done:
        _held[self] = None
    return done, message


@version_patches.wrap(f"{TOKENIZER}.end_weight_update", params="obj")
async def tokenizer_end_weight_update(original, self, *args: Any, **kwargs: Any):
    """Take the version that was held back if the session was committed."""
    done, message = await original(self, *args, **kwargs)
    if done or AGAIN not in message:
        version = _held.pop(self, None)
        if done or _NOT_FLUSHED in message:  # committed
            self._update_weight_version_if_provided(version)
    return done, message
