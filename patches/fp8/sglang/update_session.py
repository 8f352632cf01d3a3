"""Answer the scheduler's weight update session: begin, end, update from disk."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.sglang import (
    initialize_model,
    receipts,
    schedulers,
    session,
    weight_version,
)
from flashpatch.patches.fp8.sglang.schedulers import MANAGER
from flashpatch.record import Contract, Patch


def on_begin(original, self, recv_req: Any):
    """Around ``begin_weight_update``: return a refusal as an answer, and leave no session open.

    A sender that numbers its updates begins anew after one that it could not finish.
    """
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    if self._session is not None and recv_req.rid and receipts.unfinished():
        self._session = None
    owners = owners_of(self, recv_req.selector) if self._session is None else []
    if not owners:
        return original(self, recv_req)
    weight_version.settle(self, False)
    done, message = session.begin(recv_req.rid or "", owners, lambda: _answer(original(self, recv_req)))
    if not done:
        self._session = None
    return BeginWeightUpdateReqOutput(success=done, message=message)


def on_end(original, self, recv_req: Any):
    """Around ``end_weight_update``: commit every written model, then flush the old policy's cache."""
    from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput
    from sglang.srt.runtime_context import get_parallel

    owners = owners_of(self, self._session.selector) if self._session is not None else []
    if not owners:
        return original(self, recv_req)
    ranks, quantization = get_parallel(), self.tp_worker.model_runner.model_config.quantization
    outcome = session.end(
        owners,
        lambda: _answer(original(self, recv_req)),
        idle=schedulers.idle(self.scheduler),
        flush=lambda: schedulers.flush(self.scheduler),
        gather=lambda receipt: receipts.of_all_ranks(receipt, self.tp_cpu_group),
        rank=(ranks.tp_rank, ranks.tp_size, quantization),
    )
    if not outcome.open:
        self._session = None
        weight_version.settle(self, outcome.committed)
    return EndWeightUpdateReqOutput(success=outcome.done, message=outcome.message)


def on_disk(original, self, recv_req: Any):
    """Around ``update_weights_from_disk``: flush the cache, also with ``flush_cache=False``."""
    owners = owners_of(self, "all")
    versions = [owner.version for owner in owners]
    output = original(self, recv_req)
    if versions != [owner.version for owner in owners]:
        output.success, output.message = session.flushed(
            output.success, output.message, lambda: schedulers.flush(self.scheduler)
        )
    return output


def owners_of(manager: Any, selector: str) -> list[model_registry.ManagedModel]:
    """Return the managed models among those a session selects."""
    models = (r.weight_updater.get_model() for _, r in manager._select_runners(selector))
    return [owner for model in models if (owner := model_registry.get(model)) is not None]


def _answer(output: Any) -> tuple[bool, str]:
    return output.success, output.message


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
