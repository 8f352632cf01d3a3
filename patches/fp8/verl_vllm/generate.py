"""Record the precision of each sample that a vLLM server returns, and the tokens that its sampling kept."""

from __future__ import annotations

from typing import Any

from flashpatch.patches.fp8.support.kept import Drawn
from flashpatch.patches.fp8.verl.correction import sample_precision
from flashpatch.patches.fp8.vllm.kept_tokens import HELD
from flashpatch.record import Contract, Patch


async def on_generate(original, self, *args: Any, **kwargs: Any) -> Any:
    """Around ``vLLMHttpServer.generate``: add the precision to the sample's extra fields, and the kept ids that the engine
    returned to the log-probabilities."""
    held: list[Any] = []
    token = HELD.set(held)
    try:
        output = await original(self, *args, **kwargs)
    finally:
        HELD.reset(token)
    if held and output.log_probs:
        output.log_probs = [Drawn(*pair) for pair in zip(output.log_probs, held, strict=True)]
    sample_precision.note(output, self.replica_rank)
    return output


PATCH = Patch(
    id="fp8.verl_vllm.generate",
    targets=("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.generate",),
    requires="verl>=0.9",
    wrapper=on_generate,
    contract=Contract(
        params=("prompt_ids", "sampling_params", "request_id"),
        mentions=("TokenOutput", "self.replica_rank", "self.engine.generate"),
        exists=(
            "verl.workers.rollout.replica:TokenOutput.extra_fields",
            "verl.workers.rollout.replica:TokenOutput.log_probs",
        ),
    ),
    evidence="step",
    when="anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_vllm.launch_servers",
    scope=frozenset({"driver"}),
    needs=("fp8.verl.calculate_debug_metrics",),
    why="In a mixed fleet the trainer cannot tell which samples come from an 8-bit replica, nor under truncated sampling "
    "which tokens were kept.",
    how="Adds the replica's precision to the sample's extra fields; with the option support, the kept ids to the "
    "log-probabilities.",
    remove_when="verl's samples name their replica and have sampling masks.",
)
