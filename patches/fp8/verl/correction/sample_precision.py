"""Each sample says in what precision it was drawn, where a fleet is mixed."""

from __future__ import annotations

from typing import Any

from flashpatch import engine
from flashpatch.patches.fp8.precision import flashrl_compat, fleet
from flashpatch.patches.fp8.verl.correction.mismatch import KEY
from flashpatch.record import Contract, Patch


async def on_generate(original, self, *args: Any, **kwargs: Any) -> Any:
    """Around ``vLLMHttpServer.generate``: verl carries extra fields with the sample, to the trainer."""
    output = await original(self, *args, **kwargs)
    options = engine.options("fp8")
    if len(options["fleet"]) > 1:
        entries = flashrl_compat.entries(options["precision"], options["scheme"], options["fleet"])
        output.extra_fields[KEY] = fleet.assigned(entries, self.replica_rank).precision
    return output


PATCH = Patch(
    id="fp8.verl.generate",
    targets=("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.generate",),
    requires="verl>=0.9",
    wrapper=on_generate,
    contract=Contract(
        params=("prompt_ids", "sampling_params", "request_id"),
        mentions=("TokenOutput", "self.replica_rank"),
        exists=("verl.workers.rollout.replica:TokenOutput.extra_fields",),
    ),
    evidence="fault",  # a server may only score
    scope=frozenset({"driver"}),
    needs=("fp8.verl.calculate_debug_metrics",),
    tested=("0.9.1",),
    why="In a mixed fleet the trainer cannot tell which samples an 8-bit replica drew.",
    how="Puts the replica's precision among the sample's extra fields.",
    remove_when="verl's samples name their replica.",
)
