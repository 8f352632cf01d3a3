"""Follow SGLang's scheduler processes: which are started, whether they run requests, and when they may schedule one.

On SGLang scheduler and model share a process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches, Shared
from flashpatch.errors import PatchError
from flashpatch.patches._shared.context import having
from flashpatch.patches._shared.tally import count
from flashpatch.patches.fp8 import model_registry

REMOVE_WHEN = "SGLang's flash_rl covers every model, int8, and buckets that cut a fused layer."

LAUNCH = "sglang.srt.entrypoints.engine:Engine._launch_scheduler_processes"
LAUNCHED: Shared = {
    "relies_on": "scheduler_procs",
    "params": "server_args",
    "evidence": "optional",
    "when": "child=engine-core",
    "scope": "driver",
    "why": "A process that never loaded FlashPatch writes nothing, so its parent records that it is expected.",
}
SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
FLUSH = (
    f"{SCHEDULER}.is_fully_idle",
    f"{SCHEDULER}.flush_cache",
    "sglang.srt.managers.mm_utils:init_mm_embedding_cache",
    "sglang.srt.mem_cache.multimodal_cache:MultiModalStaticCache.clear",
)
ABORT = (
    f"{SCHEDULER}.abort_request",
    "sglang.srt.managers.io_struct:AbortReq.abort_all",
    "sglang.srt.managers.io_struct:AbortReq.finished_reason",
)

_stepped = False
_refusing = False  # whether this process ended requests last
_known: weakref.WeakKeyDictionary[Any, Callable[[Any], bool]] = weakref.WeakKeyDictionary()

patches = Patches("fp8", "sglang>=0.5.21", scope="engine-core", remove_when=REMOVE_WHEN)


@patches.wrap(LAUNCH, **LAUNCHED, remove_when="never: this is the evidence itself.")
def launch_scheduler_processes(original, cls, *args: Any, **kwargs: Any):
    """After the start, write an expected row with the child's pid and start time."""
    result = original(cls, *args, **kwargs)
    for process in result[1] or ():
        ledger.expect(process.pid, roles=("engine-core",), families=("fp8",))
    return result


@patches.wrap(
    f"{SCHEDULER}.__init__",
    relies_on=FLUSH,
    params="server_args",
    evidence="install",
    why="Only the scheduler knows whether requests run, and holds the cache to flush.",
)
def scheduler_init(original, self, *args: Any, **kwargs: Any):
    """Remember the schedulers of this process."""
    begin(self, idle_but_waiting)
    original(self, *args, **kwargs)


def begin(scheduler: Any, idle: Callable[[Any], bool]) -> None:
    """Remember a scheduler of this process, and how this generation of SGLang tells whether its cache is in use."""
    engine.require("fp8")
    ledger.role("engine-core")
    _known[scheduler] = idle


def idle_but_waiting(scheduler: Any) -> bool:
    """Whether nothing of a scheduler's cache is in use: requests that wait hold nothing computed."""
    return scheduler.is_fully_idle(ignore_waiting=True)


def known() -> list[Any]:
    """Return the schedulers that are alive."""
    return list(_known)


def busy() -> bool:
    """Whether requests are running; those that wait, while the engine is paused, hold nothing computed."""
    return any(not idle(scheduler) for scheduler in known())


def idle(scheduler: Any) -> bool:
    """Whether nothing of the cache is in use."""
    return _known.get(scheduler, idle_but_waiting)(scheduler)


def flush(scheduler: Any) -> bool:
    """Flush the cache although requests wait, and embeddings of images; False, and nothing, while some run.

    SGLang never empties the embeddings, which have the image alone as key. It refuses to flush because waiting requests may
    hold parts of the cache; `idle` has checked that none does."""
    if not idle(scheduler):
        return False
    from sglang.srt.managers.mm_utils import init_mm_embedding_cache  # its module differs by version

    if embeddings := init_mm_embedding_cache.__globals__["embedding_cache"]:  # None without images
        embeddings.clear()
    with having(scheduler, "waiting_queue", []):
        return bool(scheduler.flush_cache())


@patches.wrap(
    f"{SCHEDULER}.attach_hicache_storage_wrapped",
    relies_on="sglang.srt.managers.io_struct:AttachHiCacheStorageReqOutput",
    evidence="optional",
    why="A store that is attached brings KV back which no flush of an update has emptied.",
)
def attach_hicache_storage_wrapped(original, self, *args: Any, **kwargs: Any):
    """Refuse a storage backend for the hierarchical cache of an engine that takes updates."""
    if not model_registry.all_models():
        return original(self, *args, **kwargs)
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

    problem = "a storage backend keeps KV of other policies than the next update's, so none is attached while FlashPatch is on"
    advice = "Set hicache_storage_backend when you open an engine that takes no updates."
    error = PatchError(problem, patch=patches.of(attach_hicache_storage_wrapped).id, advice=advice)
    return AttachHiCacheStorageReqOutput(success=False, message=str(error))


@patches.wrap(
    f"{SCHEDULER}.get_next_batch_to_run",
    relies_on=ABORT,
    why="An engine that schedules on half-updated weights serves a policy that never existed.",
)
def get_next_batch_to_run(original, self, *args: Any, **kwargs: Any):
    """Check one flag per model before each batch; end the requests with the reason."""
    gate(self, patches.of(get_next_batch_to_run).id, abort_all)
    return original(self, *args, **kwargs)


def gate(scheduler: Any, patch: str, abort: Callable[[Any, str, dict[str, Any]], None]) -> None:
    """End a scheduler's requests with the reason if the policy may not generate now. A drafter decides how fast tokens come,
    never which.

    Args:
        scheduler: which is about to run them.
        patch: id of the patch that asks.
        abort: ends them, with a message, which is in SGLang's reason for the end too."""
    global _refusing, _stepped
    if not _stepped and not scheduler.running_batch.is_empty():
        _stepped = True
        ledger.note(steps=1)  # a batch came back from the workers
    broken = None
    for owner in model_registry.all_models():
        if owner.adapter.role == "target" and not owner.may_generate:
            broken = owner
    if broken is None and _refusing:
        _refusing = False
        ledger.note(refusing="")
        ledger.flush()  # SGLang ends its processes by SIGKILL
    if broken is None or (not scheduler.waiting_queue and scheduler.running_batch.is_empty()):
        return
    message = f"[flashpatch: {patch}] {broken.policy().why_refused()}. Send a complete update."
    _refusing = True
    ledger.note(refusing=message)  # before the event, with which the row is written
    ledger.event("refused", what="requests", problem=message)
    count("requests_refused")
    abort(scheduler, message, {"type": "abort", "status_code": 503, "message": message})


def abort_all(scheduler: Any, message: str, reason: dict[str, Any]) -> None:
    """End all requests of a scheduler."""
    from sglang.srt.managers.io_struct import AbortReq

    scheduler.abort_request(AbortReq(abort_all=True, finished_reason=reason))
