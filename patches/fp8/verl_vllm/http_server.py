"""Forward worker results and engine death to the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.verl_vllm.server_adapter import RECEIVE
from flashpatch.record import Contract, Patch

ID = "fp8.verl_vllm.collective_rpc"
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"
_TICK = 0.5  # seconds between two checks of the engine


async def on_collective_rpc(
    original, self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None
):
    """Around ``vLLMHttpServer.collective_rpc``, which drops the workers' answers: return those of an update.

    Raises:
        PatchError: the engine ended before it answered.
    """
    if method == RECEIVE:
        answer = self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)
    else:
        answer = original(self, method, timeout, args, kwargs)
    return await _while_alive(self, answer, str(method))


async def on_clear(original, self):
    """Around ``vLLMHttpServer.clear_kv_cache``, the end of each sync.

    Raises:
        PatchError: the engine ended before it answered.
    """
    return await _while_alive(self, original(self), "clear_kv_cache")


async def _while_alive(server: Any, answer: Awaitable[Any], what: str) -> Any:
    """Return a call's answer; vLLM's client alone would wait for ever if the engine ends."""
    call = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait({call}, timeout=_TICK))[0]:
            if getattr(getattr(server, "engine", None), "errored", False):
                raise PatchError(
                    f"the rollout engine ended during {what}.",
                    patch=ID,
                    advice="The log of the rollout server has the reason; a worker may have been killed.",
                )
        return call.result()
    finally:
        call.cancel()


_patch = partial(
    Patch,
    requires="verl>=0.9",
    evidence="optional",
    scope=frozenset({"driver"}),
    remove_when="verl returns the answers, and vLLM fails the calls under way when an engine core ends.",
)

PATCH = _patch(
    id=ID,
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.server_adapter_update_weights",
    targets=(f"{SERVER}.collective_rpc",),
    wrapper=on_collective_rpc,
    contract=Contract(
        params=("method", "timeout", "args", "kwargs"),
        mentions=("self.engine.collective_rpc",),
        exists=("vllm.v1.engine.async_llm:AsyncLLM.errored",),
    ),
    why="verl's server drops the workers' answers, and a call to an engine that dies meanwhile never returns: "
    "vLLM's client fails later calls only.",
    how="Returns the receipts of an update, and while any call runs checks that the engine still lives.",
)

CLEAR = _patch(
    id="fp8.verl_vllm.clear_kv_cache",
    evidence="update",
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.server_adapter_update_weights",
    targets=(f"{SERVER}.clear_kv_cache",),
    wrapper=on_clear,
    contract=Contract(mentions=("self.engine.reset_prefix_cache",)),
    needs=(ID,),
    why="The same: an engine that dies while a sync clears its caches leaves the trainer waiting.",
    how="Checks that the engine still lives while the call runs.",
)
