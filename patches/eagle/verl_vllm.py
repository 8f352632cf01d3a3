"""Reach vLLM's workers from verl's driver. A group of its own, checked when verl imports its code for vLLM."""

from __future__ import annotations

from typing import Any

from flashpatch.decorate import Patches
from flashpatch.patches.eagle.options import UNTIL_VERL
from flashpatch.patches.eagle.vllm.drafter_refit import METHOD_NAMES


@Patches("eagle", "verl>=0.9", framework="verl_vllm", scope="driver", remove_when=UNTIL_VERL).wrap(
    "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.collective_rpc",
    relies_on="self.engine.collective_rpc",
    evidence="optional",  # a job without co-training calls none of the methods
    why="verl's server calls its workers and drops what they answer: where samples are, what is accepted.",
)
async def collective_rpc(
    original, self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None
):
    """Return the answers of the family's own methods; other calls are unchanged."""
    if method in METHOD_NAMES:
        return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)
    return await original(self, method, timeout, args, kwargs)


def start_call(server: Any, method: str, arguments: tuple) -> Any:
    """Call a worker method through verl's server actor; return Ray's reference to the workers' answers."""
    return server.collective_rpc.remote(method, args=arguments)
