"""Make one update session of each sync that verl's client sends to SGLang 0.5.12, and keep its receipt.

SGLang has no sessions there. FlashPatch's part of the server takes them in requests that `sglang_sessions` describes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from contextlib import nullcontext
from typing import Any

from flashpatch.patches._shared import sglang_sessions
from flashpatch.patches.fp8.sglang_0_5_12 import arguments
from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
from flashpatch.patches.fp8.verl_sglang import http_engine, server_adapter
from flashpatch.patches.fp8.verl_sglang_0_5_12.server import FRAMEWORK, for_verl
from flashpatch.record import Contract

ENDPOINT = "update_weights_from_tensor"
MODULE = "verl.workers.rollout.sglang_rollout.http_server_engine"


def on_client(original, self, *args: Any, launch_server: bool = True, **kwargs: Any) -> None:
    """Around ``HttpServerAdapter.__init__``, which makes arguments of a server in the trainer's process too."""
    with nullcontext() if launch_server else arguments.of_another_server():
        original(self, *args, launch_server=launch_server, **kwargs)


def on_update(original, self, weights: Any, *args: Any, **kwargs: Any) -> Coroutine:
    """Around ``update_weights``; see `server_adapter.on_update`.

    Raises:
        PatchError: see there.
    """

    def begin(sync: str) -> Awaitable[Any]:
        return http_engine.post_patiently(self._engine, ENDPOINT, sglang_sessions.begin(sync), UPDATE.id)

    return server_adapter.update(original, self, weights, args, kwargs, begin, UPDATE)


async def on_tensor(original, self, req: Any) -> Any:
    """Around ``update_weights_from_tensor``: within a sync, post one bucket of the policy, once.

    Raises:
        PatchError: see `http_engine.post`.
    """
    if WEIGHT_SYNC.sending is None:
        return await original(self, req)
    fields = {**http_engine.bucket(req), "disable_draft_model": True}
    return await http_engine.post(self, ENDPOINT, fields, TENSOR.id)


async def on_flush(original, self) -> Any:
    """Around ``flush_cache``: within a sync, which verl ends so, end the session; that commits, then flushes once.

    Raises:
        PatchError: see `http_engine.post`.
    """
    return await http_engine.flush_or_end(
        lambda: original(self), lambda: http_engine.post(self, ENDPOINT, sglang_sessions.end(), FLUSH.id)
    )


_SENT = f"anywhere=fp8.verl.validate_config_rollout anywhere={FRAMEWORK}.server_adapter_update_weights"

UPDATE = for_verl(
    id=f"{FRAMEWORK}.server_adapter_update_weights",
    targets=server_adapter.PATCH.targets,
    wrapper=on_update,
    contract=Contract(
        params=server_adapter.PATCH.contract.params,
        mentions=server_adapter.PATCH.contract.mentions,
    ),
    evidence="update",
    when=f"anywhere=fp8.verl.validate_config_rollout anywhere={FRAMEWORK}.launch_servers",
    scope=frozenset({"trainer"}),
    needs=(f"{FRAMEWORK}.update_weights_from_tensor", f"{FRAMEWORK}.flush_cache"),
    why="SGLang takes each bucket for an update of its own, and verl does not know which policy a replica holds after a sync.",
    how="Opens a session for the policy before the first bucket, and keeps the receipts of the server's ranks until the "
    "driver asks. After a failure the session stays open, so that nothing half-updated is served.",
    remove_when="verl tells SGLang where an update begins and ends, and returns what each rank committed.",
)

CLIENT = for_verl(
    id=f"{FRAMEWORK}.http_server_adapter_init",
    targets=(f"{MODULE}:HttpServerAdapter.__init__",),
    wrapper=on_client,
    contract=Contract(params=("launch_server",), mentions=("ServerArgs",)),
    evidence="update",
    when=_SENT,
    scope=frozenset({"trainer"}),
    why="verl's client describes its server by arguments of an engine, which the trainer never opens: in a mixed fleet they "
    "have no replica's number, and the trainer would end.",
    how="Leaves the arguments of a client that launches no server as they are.",
    remove_when="verl's client keeps host and port alone.",
)

TENSOR = for_verl(
    id=f"{FRAMEWORK}.update_weights_from_tensor",
    targets=http_engine.TENSOR.targets,
    wrapper=on_tensor,
    contract=Contract(
        params=("req",),
        mentions=http_engine.TENSOR.contract.mentions,
        exists=("sglang.srt.managers.io_struct:UpdateWeightsFromTensorReqInput.disable_draft_model",),
    ),
    evidence="update",
    when=_SENT,
    scope=frozenset({"trainer"}),
    needs=(f"{FRAMEWORK}.server_adapter_update_weights",),
    why=http_engine.TENSOR.why,
    how=http_engine.TENSOR.how,
    remove_when="verl's client knows which requests it may repeat, and passes disable_draft_model and flush_cache on.",
)

FLUSH = for_verl(
    id=f"{FRAMEWORK}.flush_cache",
    targets=http_engine.FLUSH.targets,
    wrapper=on_flush,
    contract=Contract(mentions=("self.max_attempts",)),
    evidence="update",
    when=_SENT,
    scope=frozenset({"trainer"}),
    needs=(f"{FRAMEWORK}.server_adapter_update_weights",),
    why="The end of a sync is known in verl's client alone; and a flush that fails is only logged.",
    how="At the end of a sync ends the session, which commits the update, flushes the cache and answers with receipts.",
    remove_when=server_adapter.PATCH.remove_when,
)
