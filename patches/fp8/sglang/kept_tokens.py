"""Ask SGLang for its sampling masks: the ids of all kept tokens, and log-probabilities over them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.patches.fp8.support.kept import TOO_MANY, Drawn

HELD: ContextVar[list[Drawn] | None] = ContextVar("flashpatch_sglang_kept_tokens", default=None)
"""Where the request that is being handed to the engine wants its log-probabilities: one `Drawn` per token."""


@Patches(
    "fp8",
    "sglang>=0.5.21",
    scope="driver",
    evidence="optional",
    when="support!=0 anywhere=fp8.verl.validate_config_correction",
    tested="0.5.23",
    why="Under top-p, top-k or min-p a token is drawn from the kept ones only. SGLang tells which if it is asked, and its "
    "log-probabilities are over the whole vocabulary.",
    remove_when="verl asks SGLang for sampling masks, and passes them on.",
).wrap(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request",
    relies_on=(
        "sglang.srt.managers.io_struct:GenerateReqInput.return_sampling_mask",
        "sglang.srt.managers.io_struct:GenerateReqInput.return_logprob",
    ),
    params=("obj", "request"),
)
def generate_request(original, self, obj: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """With the option support, ask for the sampling mask: the kept ids, and the drawn token's log-probability over them."""
    held, width = HELD.get(), engine.options("fp8")["support"]
    if held is None or not is_carried(obj, width):
        return original(self, obj, *args, **kwargs)
    obj.return_sampling_mask = True
    return collected(original(self, obj, *args, **kwargs), held, width)


def is_carried(asked: Any, width: int) -> bool:
    """Whether the kept ids of a request are collected: it samples, at most ``width`` tokens are kept, and it asks for
    log-probabilities."""
    params = asked.sampling_params or {}
    return (
        bool(asked.return_logprob)
        and params.get("temperature", 1) > 0
        and 0 < params.get("top_k", -1) <= width
    )


async def collected(outputs: AsyncIterator[Any], held: list[Drawn], width: int) -> AsyncIterator[Any]:
    """Yield the engine's outputs, and put what is known of their tokens so far into ``held``."""
    import numpy

    async for output in outputs:
        found = output["meta_info"]
        if "output_token_sampling_mask" in found:
            pairs = zip(
                found["output_token_sampling_logprobs"], found["output_token_sampling_mask"], strict=True
            )
            held[:] = [
                Drawn(value, numpy.array(ids if len(ids) <= width else [TOO_MANY], dtype=numpy.int32))
                for value, ids in pairs
            ]
        yield output
