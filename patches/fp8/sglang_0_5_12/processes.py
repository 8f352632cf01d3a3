"""Follow the scheduler processes of SGLang 0.5.12 to 0.5.20, and schedule nothing unless their models hold one whole policy."""

from __future__ import annotations

from typing import Any

from flashpatch.patches._shared.context import having
from flashpatch.patches.fp8.sglang import schedulers
from flashpatch.patches.fp8.sglang.schedulers import SCHEDULER
from flashpatch.patches.fp8.sglang_0_5_12.record import as_newer, for_old_sglang

patches = for_old_sglang(scope="engine-core")

patches.wrap(schedulers.LAUNCH, **schedulers.LAUNCHED)(schedulers.launch_scheduler_processes)


@patches.wrap(
    f"{SCHEDULER}.__init__",
    relies_on=schedulers.FLUSH,
    params="server_args",
    evidence="install",
    **as_newer(schedulers.scheduler_init),
)
def scheduler_init(original, self, *args: Any, **kwargs: Any):
    """Remember the scheduler."""
    schedulers.begin(self, idle)
    original(self, *args, **kwargs)


_attach = schedulers.attach_hicache_storage_wrapped
patches.wrap(f"{SCHEDULER}.{_attach.__name__}", evidence="optional", **as_newer(_attach))(_attach)


def idle(scheduler: Any) -> bool:
    """Whether nothing of a scheduler's cache is in use; requests that wait hold nothing computed."""
    with having(scheduler, "waiting_queue", []):
        return scheduler.is_fully_idle()


@patches.wrap(
    f"{SCHEDULER}.get_next_batch_to_run",
    relies_on=(*schedulers.ABORT, "sglang.srt.managers.io_struct:AbortReq.abort_message"),
    **as_newer(schedulers.get_next_batch_to_run),
)
def get_next_batch_to_run(original, self, *args: Any, **kwargs: Any):
    """End requests when no model may generate."""
    schedulers.gate(self, patches.of(get_next_batch_to_run).id, abort_all)
    return original(self, *args, **kwargs)


def abort_all(scheduler: Any, message: str, reason: dict[str, Any]) -> None:
    """End all requests. SGLang gives one that waits no reason, so its answer gets it here."""
    from sglang.srt.managers.io_struct import AbortReq

    sender = getattr(scheduler, "ipc_channels", scheduler).send_to_tokenizer
    send = sender.send_output

    def with_reason(output: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(output, AbortReq):
            output.finished_reason = reason
        send(output, *args, **kwargs)

    with having(sender, "send_output", with_reason):
        scheduler.abort_request(AbortReq(abort_all=True, abort_message=message))
