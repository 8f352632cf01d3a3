"""Send the final tokens of finished requests to the workers, with the next step.

A worker does not know them: it sees tokens behind a stop that the scheduler cuts off, and with asynchronous
scheduling it holds placeholders.
"""

from __future__ import annotations

import weakref
from typing import Any

from flashpatch import engine
from flashpatch.patches.eagle.vllm.targets import SCHEDULER, EnginePatch
from flashpatch.record import Contract

ATTRIBUTE = "flashpatch_finished"
"""Attribute of a ``SchedulerOutput``: request id to (tokens, prompt length), or None for a prompt of
embeddings."""

_finished: weakref.WeakKeyDictionary[Any, dict[str, tuple[list[int], int] | None]] = (
    weakref.WeakKeyDictionary()
)


def on_free(original, self, request: Any, *args: Any, **kwargs: Any):
    """Around ``Scheduler._free_request``, where every request ends: keep its final tokens."""
    if engine.options("eagle")["capture_rate"]:
        _finished.setdefault(self, {})[request.request_id] = _final_tokens(request)
    return original(self, request, *args, **kwargs)


def attach(scheduler: Any, scheduler_output: Any) -> None:
    """Add the final tokens of the requests that ``scheduler_output`` reports as finished."""
    finished = _finished.get(scheduler)
    if finished:
        tokens = {name: finished.pop(name, None) for name in scheduler_output.finished_req_ids}
        setattr(scheduler_output, ATTRIBUTE, tokens)


def _final_tokens(request: Any) -> tuple[list[int], int] | None:
    if request.prompt_token_ids is None:
        return None
    return list(request.all_token_ids), request.num_prompt_tokens


PATCH = EnginePatch(
    id="eagle.vllm.free_request",
    targets=(f"{SCHEDULER}._free_request",),
    wrapper=on_free,
    contract=Contract(
        params=("request",),
        mentions=("self.finished_req_ids.add",),
        exists=(
            "vllm.v1.request:Request.num_prompt_tokens",
            "vllm.v1.request:Request.all_token_ids",
            "vllm.v1.request:Request.prompt_token_ids",
        ),
    ),
    evidence="optional",
    why="Only the scheduler knows which tokens a finished request kept.",
    how="Notes tokens and prompt length of each request as it is freed.",
)
