"""Answer update requests in the scheduler of SGLang 0.5.12: sessions, commits, flushes, release of memory."""

from __future__ import annotations

from functools import partial
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches._shared import sglang_sessions
from flashpatch.patches.fp8.refit import model_registry, update_events
from flashpatch.patches.fp8.sglang import (
    memory,
    receipts,
    reload,
    schedulers,
    session,
    weight_checker,
    weight_updater,
)
from flashpatch.patches.fp8.sglang_0_5_12.record import FRAMEWORK, REQUIRES, for_old_sglang
from flashpatch.record import Contract

MIXIN = "sglang.srt.managers.scheduler_update_weights_mixin:SchedulerUpdateWeightsMixin"


def on_tensor(original, self, recv_req: Any):
    """Around ``update_weights_from_tensor``: a bucket, or what `sglang_sessions` says."""
    sync = sglang_sessions.sync_of(recv_req.load_format)
    if sync is not None:
        return _output(self, *_begin(self, sync))
    if sglang_sessions.is_end(recv_req.load_format):
        return _output(self, *_end(self))
    if self.draft_worker is not None and not recv_req.disable_draft_model and owners_of(self, "draft"):
        problem = "this request would load the policy into the drafter too"
        refused = PatchError(problem, patch=TENSOR.id, advice="Set disable_draft_model=True.")
        return _output(self, False, str(refused))
    return _bucket(original, self, recv_req)


def on_distributed(original, self, recv_req: Any):
    """Around ``update_weights_from_distributed``."""
    return _bucket(original, self, recv_req)


def on_disk(original, self, recv_req: Any):
    """Around ``update_weights_from_disk``: flush the cache, also with ``flush_cache=False``."""
    return _bucket(original, self, recv_req)


def on_release(original, self, recv_req: Any):
    """Around ``release_memory_occupation``."""
    given = self.server_args
    if not given.enable_memory_saver or not memory.has_weights(recv_req.tags):
        return original(self, recv_req)
    whole = given.enable_weights_cpu_backup
    kept = dict(target=whole, draft=whole or given.enable_draft_weights_cpu_backup)
    owners = {role: owners_of(self, role) for role in memory.ROLES}
    return memory.release(owners, kept, lambda: original(self, recv_req))


def on_resume(original, self, recv_req: Any):
    """Around ``resume_memory_occupation``."""
    output = original(self, recv_req)
    if memory.has_weights(recv_req.tags):
        memory.resume([owner for role in memory.ROLES for owner in owners_of(self, role)])
    return output


def on_check(original, self, recv_req: Any):
    """Around ``check_weights``, which resets the policy alone."""
    return weight_checker.check(
        recv_req,
        lambda role: owners_of(self, role) if role == "target" else [],
        lambda: original(self, recv_req),
    )


def owners_of(scheduler: Any, role: str) -> list[model_registry.ManagedModel]:
    """Return the managed models of a role, target or draft; SGLang's workers name their drafters differently."""
    policy = scheduler.tp_worker.model_runner.model
    owner = model_registry.get(policy)
    if role == "target":
        return [owner] if owner is not None else []
    return [one for one in model_registry.all_models() if one is not owner]


def idle(scheduler: Any) -> bool:
    """Whether nothing of a scheduler's cache is in use; requests that wait hold nothing computed."""
    with schedulers.nothing_waiting(scheduler):
        return scheduler.is_fully_idle()


def _begin(scheduler: Any, sync: str) -> tuple[bool, str]:
    if receipts.current() is not None and not (sync and receipts.unfinished()):
        return False, "an update session is open already; end it first"
    owners = owners_of(scheduler, "target")
    if not owners:
        return False, "FlashPatch follows no model of this engine, so that no session can be opened"

    def do() -> tuple[bool, str]:
        for owner in owners:
            owner.begin()
        return True, "Success"

    done, message = session.begin(sync, owners, do)
    for observer in sglang_sessions.observers if done else ():
        observer.begin(sync)
    return done, message


def _end(scheduler: Any) -> tuple[bool, str]:
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_world_size

    if receipts.current() is None:
        return False, "no update session is open; begin one first"
    owners, runner = owners_of(scheduler, "target"), scheduler.tp_worker.model_runner

    def do() -> tuple[bool, str]:
        problem = next(filter(None, [observer.end() for observer in sglang_sessions.observers]), "")
        if problem:
            raise RuntimeError(problem)
        for owner in owners:
            reload.commit(owner)
        return True, "Success"

    outcome = session.end(
        owners,
        do,
        idle=schedulers.idle(scheduler),
        flush=lambda: schedulers.flush(scheduler),
        gather=lambda receipt: receipts.of_all_ranks(receipt, scheduler.tp_cpu_group),
        rank=(runner.tp_rank, get_tensor_model_parallel_world_size(), runner.model_config.quantization),
    )
    return outcome.done, outcome.message


def _bucket(original, scheduler: Any, recv_req: Any) -> Any:
    """Load what a request brings; commit an update that it completes, and flush once then, not with every request."""
    owners = owners_of(scheduler, "target")
    if not owners:
        return original(scheduler, recv_req)
    versions = [owner.version for owner in owners]
    recv_req.flush_cache = False
    output = original(scheduler, recv_req)
    if output.success and receipts.current() is None:

        def commit() -> tuple[bool, str]:
            for owner in owners:
                owner.commit_if_complete()
                update_events.note(owner)
            return True, output.message

        output.success, output.message = weight_updater.exception_as_answer(commit)
    if versions != [owner.version for owner in owners]:
        output.success, output.message = session.flushed(
            output.success, output.message, lambda: schedulers.flush(scheduler)
        )
    elif output.success and any(owner.state == "open" for owner in owners):
        output.message += sglang_sessions.OPEN
    return output


def _output(scheduler: Any, done: bool, message: str) -> Any:
    import torch
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    torch.distributed.barrier(group=scheduler.tp_cpu_group)
    return UpdateWeightsFromTensorReqOutput(done, message)


_patch = partial(
    for_old_sglang,
    scope=frozenset({"engine-core"}),
    evidence="optional",  # an engine is updated through one of these functions
    needs=(f"{FRAMEWORK}.initialize_model", f"{FRAMEWORK}.scheduler_init"),
)
_once = partial(
    _patch,
    why="SGLang takes every request for a whole update: it flushes the cache with each, or never.",
    how="Commits the update when everything has come, or at the session's end, and flushes the cache once, then.",
)

TENSOR = _once(
    id=f"{FRAMEWORK}.update_weights_from_tensor",
    targets=(f"{MIXIN}.update_weights_from_tensor",),
    when=f"called={FRAMEWORK}.runner_update_weights_from_tensor",
    wrapper=on_tensor,
    contract=Contract(
        params=("recv_req",),
        mentions=("recv_req.disable_draft_model", "self.draft_worker", "self.tp_worker", "self.tp_cpu_group"),
        exists=(
            "sglang.srt.managers.io_struct:UpdateWeightsFromTensorReqInput.load_format",
            "sglang.srt.managers.io_struct:UpdateWeightsFromTensorReqOutput",
        ),
    ),
)

DISTRIBUTED = _once(
    id=f"{FRAMEWORK}.update_weights_from_distributed",
    targets=(f"{MIXIN}.update_weights_from_distributed",),
    when=f"called={FRAMEWORK}.runner_update_weights_from_distributed",
    wrapper=on_distributed,
    contract=Contract(params=("recv_req",), mentions=("self.flush_cache_after_weight_update",)),
)

DISK = _once(
    id=f"{FRAMEWORK}.update_weights_from_disk",
    targets=(f"{MIXIN}.update_weights_from_disk",),
    when=f"called={FRAMEWORK}.runner_update_weights_from_disk",
    wrapper=on_disk,
    contract=Contract(params=("recv_req",), mentions=("self.flush_cache_after_weight_update",)),
)

RELEASE = _patch(
    id=f"{FRAMEWORK}.release_memory_occupation",
    targets=(f"{MIXIN}.release_memory_occupation",),
    wrapper=on_release,
    contract=memory.RESUME.contract,
    why=memory.RELEASE.why,
    how=memory.RELEASE.how,
)

RESUME = _patch(
    id=f"{FRAMEWORK}.resume_memory_occupation",
    targets=(f"{MIXIN}.resume_memory_occupation",),
    wrapper=on_resume,
    contract=memory.RESUME.contract,
    why=memory.RESUME.why,
    how=memory.RESUME.how,
)

CHECK = weight_checker.record(
    id=f"{FRAMEWORK}.check_weights",
    targets=(f"{MIXIN}.check_weights",),
    tested=(),
    requires=REQUIRES,
    needs=(f"{FRAMEWORK}.initialize_model",),
    wrapper=on_check,
)
