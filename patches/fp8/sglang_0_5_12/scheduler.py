"""Answer update requests in the scheduler of SGLang 0.5.12 to 0.5.20: sessions, commits, flushes, release of memory, and versions."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches._shared import sglang_sessions
from flashpatch.patches._shared.context import holding
from flashpatch.patches.fp8 import model_registry
from flashpatch.patches.fp8.sglang import memory, model, receipts, schedulers, update_session, weight_updater
from flashpatch.patches.fp8.sglang_0_5_12.model import TP_RANK
from flashpatch.patches.fp8.sglang_0_5_12.record import (
    FRAMEWORK,
    NAMESPACES,
    as_newer,
    for_old_sglang,
    namespaces,
)
from flashpatch.patches.fp8.update import events

MIXIN = "sglang.srt.managers.scheduler_update_weights_mixin:SchedulerUpdateWeightsMixin"
TOKENIZER = update_session.TOKENIZER
_UPDATED = " Weight version updated to "
"""What SGLang's tokenizer ends an answer with, and the scheduler tells the tokenizer with; the version follows."""

# Model to the version that its open update brings, and to the number of the change of state that opened it.
_held: weakref.WeakKeyDictionary[model_registry.ManagedModel, tuple[int, str]] = weakref.WeakKeyDictionary()


def _either(name: str) -> tuple[str, str]:
    """Return where a scheduler answers: in a part of it, before 0.5.13 by itself."""
    return f"{update_session.MANAGER}.{name}", f"{MIXIN}.{name}"


def _scheduler(part: Any) -> Any:
    """Return the scheduler that a part, which may be all of it, belongs to."""
    return next(one for one in schedulers.known() if getattr(one, "tp_worker", None) is part.tp_worker)


patches = for_old_sglang(
    scope="engine-core",
    evidence="optional",  # an engine is updated through one of these functions
    why="SGLang takes every request for a whole update: it flushes the cache with each, or never.",
)


@patches.wrap(
    *_either("update_weights_from_tensor"),
    relies_on=(
        "recv_req.disable_draft_model",
        "self.draft_worker",
        "self.tp_worker",
        "self.tp_cpu_group",
        "sglang.srt.managers.io_struct:UpdateWeightsFromTensorReqInput.load_format",
        "sglang.srt.managers.io_struct:UpdateWeightsFromTensorReqOutput",
        TP_RANK,
    ),
    when=f"called={FRAMEWORK}.runner_update_weights_from_tensor",
)
def update_weights_from_tensor(original, self, recv_req: Any):
    """Commit the update when everything has come, or at the session's end, and flush the cache once, then.

    A request is a bucket, or what `sglang_sessions` says."""
    sync = sglang_sessions.sync_of(recv_req.load_format)
    if sync is not None:
        return _output(self, *_begin(self, sync))
    if recv_req.load_format == sglang_sessions.END:
        return _output(self, *_end(self))
    if self.draft_worker is not None and not recv_req.disable_draft_model and owners_of(self, "draft"):
        problem = "this request would load the policy into the drafter too"
        refused = PatchError(
            problem, patch=patches.of(update_weights_from_tensor).id, advice="Set disable_draft_model=True."
        )
        return _output(self, False, str(refused))
    return _bucket(original, self, recv_req)


@patches.wrap(
    *_either("update_weights_from_disk"),
    id=f"{FRAMEWORK}.update_weights_from_disk",
    relies_on="self.flush_cache_after_weight_update",
    when=f"called={FRAMEWORK}.runner_update_weights_from_disk",
    how=patches.of(update_weights_from_tensor).how,
)
@patches.wrap(
    *_either("update_weights_from_distributed"),
    relies_on="self.flush_cache_after_weight_update",
    when=f"called={FRAMEWORK}.runner_update_weights_from_distributed",
    how=patches.of(update_weights_from_tensor).how,
)
def update_weights_from_distributed(original, self, recv_req: Any):
    """Flush the cache also with ``flush_cache=False``."""
    return _bucket(original, self, recv_req)


def _bucket(original, part: Any, recv_req: Any) -> Any:
    """Load what a request brings; commit an update that it completes, and flush and stamp once then, not with every request."""
    owners = owners_of(part, "target")
    if not owners:
        return original(part, recv_req)
    versions, scheduler = [owner.version for owner in owners], _scheduler(part)
    named, recv_req.weight_version = recv_req.weight_version, None
    recv_req.flush_cache = False
    output = original(part, recv_req)
    version = named or _version(owners)
    if output.success and receipts.current() is None:

        def commit() -> tuple[bool, str]:
            for owner in owners:
                owner.before_request()
                events.note(owner)
            return True, output.message

        output.success, output.message = weight_updater.exception_as_answer(commit)
    if versions != [owner.version for owner in owners]:
        output.success, output.message = update_session.flushed(
            output.success, output.message, lambda: schedulers.flush(scheduler)
        )
        updated = _stamp(part, version)
        if not (output.success and named):  # else SGLang itself says so
            output.message += updated
    elif output.success and any(owner.state == "open" for owner in owners):
        output.message += sglang_sessions.OPEN
        if version:
            _held[owners[0]] = owners[0].changes, version
    elif output.success:
        _stamp(part, named)  # a tied tensor, sent again after the commit, may be all that names it
    return output


def _version(owners: list[model_registry.ManagedModel]) -> str | None:
    """Return the version that the open update brings, if a bucket of it has named one."""
    opened, version = _held.get(owners[0], (0, None))
    return version if opened == owners[0].changes else None


def _stamp(part: Any, version: str | None) -> str:
    """Name the policy of the tokens that follow; before 0.5.19 a scheduler knows no version. Return what tells the tokenizer."""
    if version and hasattr(part, "record_weight_version_after_update"):
        part.record_weight_version_after_update(version)
    return f"{_UPDATED}{version}." if version else ""


@patches.wrap(
    *_either("release_memory_occupation"),
    relies_on=(*memory.TAGS, "sglang.srt.server_args:get_global_server_args"),
    since=NAMESPACES,
    **as_newer(memory.release_memory_occupation),
)
def release_memory_occupation(original, self, recv_req: Any):
    """Follow the memory saver."""
    from sglang.srt.server_args import get_global_server_args

    context = namespaces()
    settings = get_global_server_args() if context is None else context.get_exec().features
    return memory.release_as_asked(
        recv_req, settings, lambda role: owners_of(self, role), lambda: original(self, recv_req)
    )


@patches.wrap(
    *_either("resume_memory_occupation"), relies_on=memory.TAGS, **as_newer(memory.resume_memory_occupation)
)
def resume_memory_occupation(original, self, recv_req: Any):
    """Follow the memory saver."""
    output = original(self, recv_req)
    if memory.has_weights(recv_req.tags):
        memory.resume([owner for role in memory.ROLES for owner in owners_of(self, role)])
    return output


@patches.wrap(
    *_either("check_weights"), relies_on="recv_req.action", tested=(), **as_newer(memory.check_weights)
)
def check_weights(original, self, recv_req: Any):
    """Follow a reset, which may be of the policy alone."""
    return memory.check(recv_req, lambda role: owners_of(self, role), lambda: original(self, recv_req))


def owners_of(part: Any, role: str) -> list[model_registry.ManagedModel]:
    """Return the managed models of a role, target or draft; SGLang's workers name their drafters differently."""
    owner = model_registry.get(part.tp_worker.model_runner.model)
    if role == "target":
        return [owner] if owner is not None else []
    return [one for one in model_registry.all_models() if one is not owner]


def _begin(part: Any, sync: str) -> tuple[bool, str]:
    if receipts.current() is not None and not (sync and receipts.unfinished()):
        return False, "an update session is open already; end it first"
    owners = owners_of(part, "target")
    if not owners:
        return False, "FlashPatch follows no model of this engine, so that no session can be opened"

    def do() -> tuple[bool, str]:
        for owner in owners:
            owner.begin()
        return True, "Success"

    done, message = update_session.begin(sync, owners, do)
    for observer in sglang_sessions.observers if done else ():
        observer.begin(sync)
    return done, message


def _end(part: Any) -> tuple[bool, str]:
    from sglang.srt.distributed import parallel_state as ranks

    if receipts.current() is None:
        return False, "no update session is open; begin one first"
    owners, scheduler = owners_of(part, "target"), _scheduler(part)
    quantization, version = part.tp_worker.model_runner.model_config.quantization, _version(owners)

    def do() -> tuple[bool, str]:
        problem = next(filter(None, [observer.end() for observer in sglang_sessions.observers]), "")
        if problem:
            raise RuntimeError(problem)
        for owner in owners:
            model.commit(owner)
        return True, "Success"

    outcome = update_session.end(
        owners,
        do,
        idle=schedulers.idle(scheduler),
        flush=lambda: schedulers.flush(scheduler),
        gather=lambda receipt: receipts.of_all_ranks(receipt, part.tp_cpu_group),
        rank=(
            ranks.get_tensor_model_parallel_rank(),
            ranks.get_tensor_model_parallel_world_size(),
            quantization,
        ),
    )
    return outcome.done, outcome.message + _stamp(part, version if outcome.committed else None)


def _output(part: Any, done: bool, message: str) -> Any:
    import torch
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    torch.distributed.barrier(group=part.tp_cpu_group)
    return UpdateWeightsFromTensorReqOutput(success=done, message=message)


version_patches = for_old_sglang(
    scope="driver", evidence="optional", why=patches.of(update_session.tokenizer_end_weight_update).why
)
_VERSION = ("obj.weight_version", "self._update_weight_version_if_provided")
_ASKING: ContextVar[bool] = ContextVar("flashpatch_asking", default=False)
"""Whether this task waits for the answer to a bucket, which alone says whether the update is committed."""


@version_patches.wrap(
    f"{TOKENIZER}._update_weight_version_if_provided",
    when=f"anywhere={FRAMEWORK}.update_weights_from_tensor anywhere={FRAMEWORK}.update_weights_from_distributed",
)
def update_weight_version_if_provided(original, self, weight_version: str | None) -> None:
    """Leave the version as it is until the answer to a bucket was read."""
    if not _ASKING.get():
        original(self, weight_version)


@version_patches.wrap(
    f"{TOKENIZER}.update_weights_from_distributed",
    id=f"{FRAMEWORK}.tokenizer_update_weights_from_distributed",
    relies_on=_VERSION,
    params="obj",
    when=f"anywhere={FRAMEWORK}.update_weights_from_distributed",
)
@version_patches.wrap(
    f"{TOKENIZER}.update_weights_from_tensor",
    relies_on=_VERSION,
    params="obj",
    when=f"anywhere={FRAMEWORK}.update_weights_from_tensor",
)
async def tokenizer_update_weights_from_tensor(
    original, self, obj: Any, *args: Any, **kwargs: Any
) -> tuple[bool, str]:
    """Take the version of a committed update from its answer, whichever of its buckets has named it.

    It is the tokenizer's process that stamps answers; from 0.5.19 on the scheduler's stamps tokens."""
    with holding(_ASKING, True):
        done, message = await original(self, obj, *args, **kwargs)
    if sglang_sessions.OPEN in message:
        return done, message.removesuffix(f"{_UPDATED}{obj.weight_version}.")
    _, updated, version = message.rpartition(_UPDATED)
    if updated:
        self._update_weight_version_if_provided(version.partition(". | ")[0].removesuffix("."))
    return done, message
