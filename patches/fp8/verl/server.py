"""The rollout server: what its workers answer reaches the trainer, and so does their engine's end."""

from __future__ import annotations

import asyncio
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.verl.adapter import RECEIVE
from flashpatch.record import Contract, Patch

ID = "fp8.verl.server"
_TICK = 0.5  # seconds between two looks at the engine


async def on_collective_rpc(original, self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None):
    """Around ``vLLMHttpServer.collective_rpc``, which drops the workers' answers: those of an update are kept.

    Raises:
        PatchError: the engine ended before it answered; vLLM's client would wait for ever.
    """
    if method == RECEIVE:
        answer = self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)
    else:
        answer = original(self, method, timeout, args, kwargs)
    call = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait({call}, timeout=_TICK))[0]:
            if getattr(getattr(self, "engine", None), "errored", False):
                raise PatchError(
                    f"the rollout engine ended during {method}.",
                    patch=ID,
                    advice="The log of the rollout server has the reason; a worker may have been killed.",
                )
        return call.result()
    finally:
        call.cancel()


PATCH = Patch(
    id=ID,
    targets=("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.collective_rpc",),
    requires="verl>=0.9",
    wrapper=on_collective_rpc,
    contract=Contract(
        params=("method", "timeout", "args", "kwargs"),
        mentions=("self.engine.collective_rpc",),
        exists=("vllm.v1.engine.async_llm:AsyncLLM.errored",),
    ),
    evidence="fault",
    scope=frozenset({"driver"}),
    tested=("0.9.1",),
    why="verl's server drops the workers' answers, and a call to an engine that dies meanwhile never returns: "
    "vLLM's client fails later calls only.",
    how="Returns the receipts of an update, and while any call runs looks whether the engine still lives.",
    remove_when="verl returns the answers, and vLLM fails the calls under way when an engine core ends.",
)
