"""Answer the scheduler's weight update session: begin, end, update from disk."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from typing import Any

from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.sglang import (
    initialize_model,
    receipts,
    schedulers,
    weight_updater,
    weight_version,
)
from flashpatch.patches.fp8.sglang.schedulers import MANAGER
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.fp8")

_NOTHING = (
    "[flashpatch: fp8.sglang.end_weight_update] the session brought no weights through the model's loader. "
    "Weights written straight into memory (P2P, RDMA) bypass quantization: send them as tensors."
)


def on_begin(original, self, recv_req: Any):
    """Around ``begin_weight_update``: return a refusal as an answer, and leave no session open.

    A sender that numbers its updates begins anew after one that it could not finish.
    """
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    if self._session is not None and recv_req.rid and receipts.unfinished():
        self._session = None
    if self._session is not None or not owners_of(self, recv_req.selector):
        return original(self, recv_req)
    weight_updater.failures.clear()
    weight_version.settle(self, False)
    receipt = receipts.begin(recv_req.rid or "", owners_of(self, recv_req.selector))
    with receipt.processing():
        done, message = weight_updater.exception_as_answer(lambda: _answer(original(self, recv_req)))
    if done:
        return BeginWeightUpdateReqOutput(success=True, message=message)
    for owner in owners_of(self, recv_req.selector):
        owner.close_if_empty()
    self._session = None
    receipts.end(False)
    return BeginWeightUpdateReqOutput(success=False, message=message)


def on_end(original, self, recv_req: Any):
    """Around ``end_weight_update``: commit every written model, then flush the old policy's cache."""
    from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput

    session = self._session
    owners = owners_of(self, session.selector) if session is not None else []
    if not owners:
        return original(self, recv_req)
    waits = None if schedulers.idle(self.scheduler) else "requests are running; wait for them"
    if any(owner.asleep for owner in owners):
        waits = "the memory of the weights is released; resume it"
    if waits is not None:
        return EndWeightUpdateReqOutput(success=False, message=f"{waits} and {weight_version.AGAIN}")
    idle = [owner.close_if_empty() for owner in owners]  # a selected drafter may have received nothing
    if all(idle) and not weight_updater.failures:
        self._session = None
        receipts.end(False)
        weight_version.settle(self, False)
        return EndWeightUpdateReqOutput(success=False, message=_NOTHING)
    versions, receipt = [owner.version for owner in owners], receipts.current()
    with receipt.processing() if receipt is not None else nullcontext():
        done, message = weight_updater.exception_as_answer(lambda: _answer(original(self, recv_req)))
        self._session = None
        committed = versions != [owner.version for owner in owners]
        weight_version.settle(self, committed)
        if committed:
            done, message = _flush(self, done, message)
        elif weight_updater.failures:
            done, message = False, weight_updater.failures[0]
    if receipt is not None and receipt.sync:
        message += _receipts(self, receipt, done)
    receipts.end(done)
    return EndWeightUpdateReqOutput(success=done, message=message)


def on_disk(original, self, recv_req: Any):
    """Around ``update_weights_from_disk``: flush the cache, also with ``flush_cache=False``."""
    owners = owners_of(self, "all")
    versions = [owner.version for owner in owners]
    output = original(self, recv_req)
    if versions != [owner.version for owner in owners]:
        output.success, output.message = _flush(self, output.success, output.message)
    return output


def owners_of(manager: Any, selector: str) -> list[model_registry.ManagedModel]:
    """Return the managed models among those a session selects."""
    models = (r.weight_updater.get_model() for _, r in manager._select_runners(selector))
    return [owner for model in models if (owner := model_registry.get(model)) is not None]


def _answer(output: Any) -> tuple[bool, str]:
    return output.success, output.message


def _receipts(manager: Any, receipt: receipts.SessionReceipt, done: bool) -> str:
    """Return the receipts of all ranks as text; after a failure, none."""
    from sglang.srt.runtime_context import get_parallel

    ranks, quantization = get_parallel(), manager.tp_worker.model_runner.model_config.quantization
    return receipts.of_all_ranks(
        receipt.of_this_rank(ranks.tp_rank, ranks.tp_size, quantization) if done else None,
        manager.tp_cpu_group,
    )


def _flush(manager: Any, done: bool, message: str) -> tuple[bool, str]:
    """Flush the cache of the old policy."""
    if schedulers.flush(manager.scheduler):
        return done, message
    return (
        False,
        "the new weights are in place, but the old cache could not be flushed: requests are running",
    )


_patch = partial(
    Patch,
    requires="sglang>=0.5.21",
    scope=frozenset({"engine-core"}),
    needs=("fp8.sglang.initialize_model",),
    remove_when=initialize_model.PATCH.remove_when,
)

BEGIN = _patch(
    id="fp8.sglang.begin_weight_update",
    targets=(f"{MANAGER}.begin_weight_update",),
    wrapper=on_begin,
    contract=Contract(params=("recv_req",), mentions=("self._session", "self._select_runners")),
    evidence="optional",
    when="called=fp8.sglang.end_weight_update",
    why="A refusal to begin must reach the caller, and the scheduler must live on.",
    how="Answers success=False with the reason.",
)

END = _patch(
    id="fp8.sglang.end_weight_update",
    targets=(f"{MANAGER}.end_weight_update",),
    wrapper=on_end,
    contract=Contract(
        params=("recv_req",),
        mentions=("self._session", "self._session.loaded_weights", "self._select_runners"),
        exists=("sglang.srt.managers.scheduler:Scheduler.is_fully_idle",),
    ),
    evidence="update",
    when="called=fp8.sglang.begin_weight_update",
    why="An incomplete update must end with an error, and not leave prefixes of the old policy in the cache.",
    how="Commits, or answers with the names that did not come; flushes the cache after a commit.",
)

DISK = _patch(
    id="fp8.sglang.scheduler_update_weights_from_disk",
    targets=(f"{MANAGER}.update_weights_from_disk",),
    wrapper=on_disk,
    contract=Contract(params=("recv_req",), mentions=("self._select_runners",)),
    evidence="optional",
    when="called=fp8.sglang.runner_update_weights_from_disk",
    why="With flush_cache=False prefixes of the old policy stay in the cache.",
    how="Flushes it after a commit.",
)
