"""Ask vLLM for the log-probabilities of all kept tokens, and collect their ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.patches.fp8.support.kept import kept_ids

if TYPE_CHECKING:
    import numpy

HELD: ContextVar[list[numpy.ndarray] | None] = ContextVar("flashpatch_kept_tokens", default=None)
"""Where the request that is being handed to the engine wants the ids: one array per token is appended."""


@Patches(
    "fp8",
    "vllm>=0.24",
    scope="driver",
    evidence="optional",
    when="support!=0 anywhere=fp8.verl.validate_config_correction",
    why="Under top-p, top-k or min-p a token is drawn from the kept ones only, and nobody else learns which.",
    remove_when="verl asks vLLM for sampling masks, and passes them on.",
).wrap(
    "vllm.v1.engine.async_llm:AsyncLLM.generate",
    relies_on=("vllm.sampling_params:SamplingParams.clone", "vllm.sampling_params:SamplingParams.top_k"),
    tested=("0.24.0", "0.29.0", "0.31.0", "0.32.0"),
)
def generate(
    original, self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
) -> AsyncIterator[Any]:
    """Ask for as many log-probabilities as the option support says: those that are finite are the kept ones."""
    held, width = HELD.get(), engine.options("fp8")["support"]
    if held is None or not is_carried(sampling_params, width):
        return original(self, prompt, sampling_params, request_id, **more)
    asked = sampling_params.clone()
    asked.logprobs = width
    return collected(original(self, prompt, asked, request_id, **more), held, width)


def is_carried(asked: Any, width: int) -> bool:
    """Whether the kept ids of a request are collected: it samples, at most ``width`` tokens are kept, and it asks for
    no log-probabilities but those of its own tokens."""
    return asked.logprobs == 0 and asked.temperature > 0 and 0 < asked.top_k <= width


async def collected(outputs: AsyncIterator[Any], held: list[numpy.ndarray], width: int) -> AsyncIterator[Any]:
    """Yield the engine's outputs, and append the ids of each new token to ``held``."""
    async for output in outputs:
        if output.outputs and output.outputs[0].logprobs is not None:
            positions = output.outputs[0].logprobs
            held.extend(kept_ids(positions[at], width) for at in range(len(held), len(positions)))
        yield output
