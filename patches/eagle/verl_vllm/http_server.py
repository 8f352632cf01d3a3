"""Return the answers of the family's worker methods from verl's vLLM server."""

from __future__ import annotations

from typing import Any

from flashpatch.patches.eagle.verl.targets import DriverPatch
from flashpatch.patches.eagle.vllm.drafter_refit import METHOD_NAMES
from flashpatch.record import Contract


async def on_collective_rpc(
    original, self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None
):
    """Around ``vLLMHttpServer.collective_rpc``, which drops the workers' answers: return those of our
    methods."""
    if method in METHOD_NAMES:
        return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)
    return await original(self, method, timeout, args, kwargs)


def start_call(server: Any, method: str, arguments: tuple) -> Any:
    """Call a worker method through verl's server actor; return Ray's reference to the workers' answers."""
    return server.collective_rpc.remote(method, args=arguments)


PATCH = DriverPatch(
    id="eagle.verl_vllm.collective_rpc",
    targets=("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.collective_rpc",),
    wrapper=on_collective_rpc,
    contract=Contract(
        params=("method", "timeout", "args", "kwargs"), mentions=("self.engine.collective_rpc",)
    ),
    evidence="optional",  # a job without co-training calls none of them
    why="verl's server calls its workers and drops what they answer: where samples are, what is accepted.",
    how="Returns the answers of the family's own methods; other calls are unchanged.",
)
