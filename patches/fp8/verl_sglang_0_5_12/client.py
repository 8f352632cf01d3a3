"""Make one update session of each sync that verl's client sends to SGLang 0.5.12 to 0.5.20, and keep its receipt.

SGLang has no sessions there. FlashPatch's part of the server takes them in requests that `sglang_sessions` describes."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from contextlib import nullcontext
from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches._shared import sglang_sessions
from flashpatch.patches._shared.context import holding
from flashpatch.patches.fp8.sglang_0_5_12 import arguments
from flashpatch.patches.fp8.sglang_0_5_12.record import REQUIRES
from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
from flashpatch.patches.fp8.verl_sglang import http_engine, server_adapter
from flashpatch.patches.fp8.verl_sglang_0_5_12.server import NAME

ENDPOINT = "update_weights_from_tensor"
MODULE = "verl.workers.rollout.sglang_rollout.http_server_engine"

_BUCKET = Patches.of(http_engine.update_weights_from_tensor)
_UPDATE = Patches.of(server_adapter.server_adapter_update_weights)

patches = Patches(
    "fp8",
    "verl>=0.9",
    framework=NAME,
    beside=REQUIRES,
    evidence="update",
    when=f"anywhere=fp8.verl.validate_config_rollout anywhere=fp8.{NAME}.server_adapter_update_weights",
    scope="trainer",
)


@patches.wrap(
    f"{MODULE}:HttpServerAdapter.__init__",
    relies_on="ServerArgs",
    params="launch_server",
    why="verl's client describes its server by arguments of an engine, which the trainer never opens: in a mixed fleet they "
    "have no replica's number, and the trainer would end.",
    remove_when="verl's client keeps host and port alone.",
)
def http_server_adapter_init(original, self, *args: Any, launch_server: bool = True, **kwargs: Any) -> None:
    """Leave the arguments of a client that launches no server as they are."""
    with nullcontext() if launch_server else holding(arguments.OF_ANOTHER_SERVER, True):
        original(self, *args, launch_server=launch_server, **kwargs)


@patches.wrap(
    *_UPDATE.targets,
    relies_on=_UPDATE.contract.mentions,
    params=_UPDATE.contract.params,
    when=f"anywhere=fp8.verl.validate_config_rollout anywhere=fp8.{NAME}.launch_servers",
    how=_UPDATE.how,
    why="SGLang takes each bucket for an update of its own, and verl does not know which policy a replica holds after a sync.",
    remove_when="verl tells SGLang where an update begins and ends, and returns what each rank committed.",
)
def server_adapter_update_weights(original, self, weights: Any, *args: Any, **kwargs: Any) -> Coroutine:
    """See `server_adapter.server_adapter_update_weights`, also for what it raises."""
    patch = patches.of(server_adapter_update_weights)

    def begin(sync: str) -> Awaitable[Any]:
        return http_engine.post_patiently(self._engine, ENDPOINT, sglang_sessions.begin(sync), patch.id)

    return server_adapter.update(original, self, weights, args, kwargs, begin, patch)


@patches.wrap(
    *_BUCKET.targets,
    relies_on=(
        *_BUCKET.contract.mentions,
        "sglang.srt.managers.io_struct:UpdateWeightsFromTensorReqInput.disable_draft_model",
    ),
    how=_BUCKET.how,
    why=_BUCKET.why,
    remove_when="verl's client knows which requests it may repeat, and passes disable_draft_model and flush_cache on.",
)
async def update_weights_from_tensor(original, self, req: Any) -> Any:
    """Post each bucket of a sync once; see `http_engine.update_weights_from_tensor`.

    Raises PatchError, see `http_engine.post`."""
    if WEIGHT_SYNC.sending is None:
        return await original(self, req)
    fields = {**http_engine.bucket(req), "disable_draft_model": True}
    return await http_engine.post(self, ENDPOINT, fields, patches.of(update_weights_from_tensor).id)


@patches.wrap(
    f"{http_engine.ENGINE}.flush_cache",
    relies_on="self.max_attempts",
    why="The end of a sync is known in verl's client alone; and a flush that fails is only logged.",
    remove_when=_UPDATE.remove_when,
)
async def flush_cache(original, self) -> Any:
    """End the session at the end of a sync, which commits the update, flushes the cache and answers with receipts.

    Raises PatchError, see `http_engine.post`."""
    return await http_engine.flush_or_end(
        lambda: original(self),
        lambda: http_engine.post(self, ENDPOINT, sglang_sessions.end(), patches.of(flush_cache).id),
    )
