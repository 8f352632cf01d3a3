"""The scheduler's word on finished requests: which tokens they kept. It travels with the next step's orders.

A worker cannot know: it sees tokens behind a stop that the scheduler cuts off, and with asynchronous
scheduling it holds placeholders.
"""

from __future__ import annotations

import weakref
from typing import Any

from flashpatch import engine
from flashpatch.patches.eagle.vllm.targets import SCHEDULER, TEXT
from flashpatch.record import Contract, Patch

ATTRIBUTE = "flashpatch_ended"
"""On a ``SchedulerOutput``: request id to (tokens, prompt length), or None where the prompt was no tokens."""

_ended: weakref.WeakKeyDictionary[Any, dict[str, tuple[list[int], int] | None]] = weakref.WeakKeyDictionary()


def on_free(original, self, request: Any, *args: Any, **kwargs: Any):
    """Around ``Scheduler._free_request``: whether stopped, capped or aborted, every request ends here."""
    if engine.options("eagle")["capture"]:
        _ended.setdefault(self, {})[request.request_id] = _truth(request)
    return original(self, request, *args, **kwargs)


def attach(scheduler: Any, orders: Any) -> None:
    """Tell the workers about the requests that they are to forget."""
    ended = _ended.get(scheduler)
    if ended:
        setattr(orders, ATTRIBUTE, {name: ended.pop(name, None) for name in orders.finished_req_ids})


def _truth(request: Any) -> tuple[list[int], int] | None:
    if request.prompt_token_ids is None:
        return None
    return list(request.all_token_ids), request.num_prompt_tokens


PATCH = Patch(
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
    **TEXT,
)
