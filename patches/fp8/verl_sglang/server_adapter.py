"""Open SGLang's update session for each sync of the trainer's server client, and keep its receipt."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from flashpatch import ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.sglang.receipts import MARK
from flashpatch.patches.fp8.verl import adapters
from flashpatch.patches.fp8.verl.transfer import receipts
from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC, relayed
from flashpatch.patches.fp8.verl_sglang import http_engine
from flashpatch.record import Patch

ADAPTER = "verl.workers.rollout.sglang_rollout.sglang_rollout:ServerAdapter"


@Patches("fp8", "verl>=0.9", framework="verl_sglang", beside="sglang>=0.5.21").wrap(
    f"{ADAPTER}.update_weights",
    relies_on=(
        "self._init_server_adapter",
        "self._engine.flush_cache",
        "sgl_update_weights",
        "sglang.srt.managers.io_struct:BeginWeightUpdateReqInput.selector",
    ),
    params=("weights", "global_steps"),
    evidence="update",
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_sglang.launch_servers",
    scope="trainer",
    why="From 0.5.21 on SGLang takes weights only between begin_weight_update and end_weight_update, which verl calls "
    "neither; and verl does not know which policy a replica holds after a sync.",
    remove_when="verl opens and ends SGLang's session, and its update returns what each rank committed.",
)
def server_adapter_update_weights(original, self, weights: Any, *args: Any, **kwargs: Any) -> Coroutine:
    """Open a session for the policy before the first bucket, and keep the receipts of the server's ranks until the driver asks.
    After a failure the session stays open, so that nothing half-updated is served.

    Raises PatchError for sparse updates, which write past the model's loader; for adapters that do not come, or before
    any base; if a request failed."""

    def begin(sync: str) -> Awaitable[Any]:
        return http_engine.begin_weight_update(self._engine, http_engine.SELECTOR, sync)

    return update(original, self, weights, args, kwargs, begin, Patches.of(server_adapter_update_weights))


async def update(
    original,
    self,
    weights: Any,
    args: tuple,
    kwargs: dict,
    begin: Callable[[str], Awaitable[Any]],
    patch: Patch,
) -> Any:
    """Send the weights within a session, and keep its receipt; a stream of a base and an adapter once for each.

    Args:
        original: verl's method, whose flush at the end ends the session.
        self: verl's ``ServerAdapter``.
        weights, args, kwargs: of the call.
        begin: opens a session on the server, given the id of the sync.
        patch: named by refusals."""
    result = None
    async for part, told in adapters.parts(self, weights, kwargs, patch):
        _refuse(told, patch)
        sending = WEIGHT_SYNC.begin(told.get("global_steps", args[0] if args else None))
        sending.adapter = bool(told.get("peft_config") and told.get("base_sync_done"))
        began, came = time.perf_counter(), relayed(part)
        await self._init_server_adapter()
        with WEIGHT_SYNC.in_sending(sending):
            if self._engine is not None and not sending.adapter:
                await begin(sending.id)
            sending.began = time.perf_counter()
            if sending.adapter and came:  # verl's own way through an adapter is a plain loop
                part = [one async for one in part]
            result = await original(self, sending.timed(part), *args, **told)
        called, ranks = self._engine is not None, (self.replica_rank, self.rollout_rank)
        answer = (
            sending.committed or {}
        )  # its receipts follow a mark; none if its processes carry no FlashPatch
        _, mark, text = str(answer.get("message") or answer.get("error_message") or "").partition(MARK)
        workers = (json.loads(text) if mark else []) if called else None
        seconds = time.perf_counter() - began
        WEIGHT_SYNC.keep_receipt(receipts.receipt(sending, *ranks, workers, seconds, called))
        if not came:
            ledger.role("trainer")
        ledger.note(sync_step=sending.step, sync_seconds=round(sending.send, 4))
        ledger.event("sent", step=sending.step, seconds=round(sending.send, 6), bytes=sending.bytes)
    return result


def _refuse(kwargs: dict[str, Any], patch: Patch) -> None:
    wire = kwargs.get("wire_format", "named_tensors")
    if wire != "named_tensors":
        raise PatchError(
            f"wire_format={wire!r} on SGLang writes past the model's loader, so that an update cannot be followed.",
            patch=patch.id,
            target=patch.targets[0],
            advice="Send whole weights: rollout.checkpoint_engine.backend=naive.",
        )
