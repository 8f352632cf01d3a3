"""Forward worker results and engine death from verl's vLLM server to the trainer, and say what its samples were drawn with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.verl.correction import mismatch
from flashpatch.patches.fp8.verl.expected_processes import of_requests, of_servers
from flashpatch.patches.fp8.verl_vllm.trainer import RECEIVE

SERVERS = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_SYNC = "anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.server_adapter_update_weights"
_TICK = 0.5  # seconds between two checks of the engine

patches = Patches(
    "fp8",
    "verl>=0.9",
    framework="verl_vllm",
    scope="driver",
    remove_when="verl returns the answers, and vLLM fails the calls under way when an engine core ends.",
)
engines = Patches("fp8", "vllm>=0.24")  # of the group that is armed without verl, as their target is


@patches.wrap(
    f"{SERVERS}:vLLMHttpServer.collective_rpc",
    relies_on=("self.engine.collective_rpc", "vllm.v1.engine.async_llm:AsyncLLM.errored"),
    evidence="optional",
    when=_SYNC,
    why="verl's server drops the workers' answers, and a call to an engine that dies meanwhile never returns: "
    "vLLM's client fails later calls only.",
)
async def collective_rpc(
    original, self, method: Any, timeout: Any = None, args: tuple = (), kwargs: Any = None
):
    """Return the receipts of an update, and while any call runs check that the engine still lives.

    Raises PatchError if the engine ended before it answered."""
    if method == RECEIVE:
        answer = self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)
    else:
        answer = original(self, method, timeout, args, kwargs)
    return await _while_alive(self, answer, str(method))


@patches.wrap(
    f"{SERVERS}:vLLMHttpServer.clear_kv_cache",
    relies_on="self.engine.reset_prefix_cache",
    evidence="update",
    when=_SYNC,
    why="The same: an engine that dies while a sync clears its caches leaves the trainer waiting.",
)
async def clear_kv_cache(original, self):
    """Check that the engine still lives while the call runs.

    Raises PatchError if the engine ended before it answered."""
    return await _while_alive(self, original(self), "clear_kv_cache")


async def _while_alive(server: Any, answer: Awaitable[Any], what: str) -> Any:
    """Return a call's answer; vLLM's client alone would wait for ever if the engine ends."""
    call = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait({call}, timeout=_TICK))[0]:
            if getattr(getattr(server, "engine", None), "errored", False):
                raise PatchError(
                    f"the rollout engine ended during {what}.",
                    patch=patches.of(collective_rpc).id,
                    advice="The log of the rollout server has the reason; a worker may have been killed.",
                )
        return call.result()
    finally:
        call.cancel()


launch_servers = of_servers(
    patches,
    f"{SERVERS}:vLLMReplica",
    "anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.generate",
)
generate_request_synced = of_requests(
    engines, "vllm.v1.engine.async_llm:AsyncLLM.generate", "anywhere=fp8.verl_vllm.generate"
)


@patches.wrap(
    f"{SERVERS}:vLLMHttpServer.generate",
    relies_on=(
        "TokenOutput",
        "self.replica_rank",
        "self.engine.generate",
        f"{SERVERS}:vLLMHttpServer.set_global_steps",
        "verl.workers.rollout.replica:TokenOutput.extra_fields",
    ),
    params=("prompt_ids", "sampling_params", "request_id"),
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.launch_servers",
    needs="fp8.verl.calculate_debug_metrics",
    why="In a mixed fleet the trainer cannot tell which samples come from an 8-bit replica.",
    remove_when="verl's samples name their replica.",
)
async def generate(original, self, *args: Any, **kwargs: Any) -> Any:
    """Add the replica's precision to the sample's extra fields."""
    output = await original(self, *args, **kwargs)
    mismatch.note_precision(output, self.replica_rank)
    return output
