"""Record which version of the policy generated each token, through verl's client and agent loops.

A request that an update of the weights stops goes on under the next version, and verl keeps the first and the last
one. Here each part of a response is recorded with its version and length. Later turns of an agent loop, of which verl
keeps nothing, add to the list of the first turn.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from flashpatch.patches.grpo.routing.journal import RESUMED, add_version
from flashpatch.record import Contract, Patch

CLIENT = "verl.workers.rollout.llm_server"
KEY = "token_versions"
"""Key among a sample's extra fields: a list of ``[version, tokens]``, in the order of the generated tokens."""


class Parts(list):
    """Hold a response's parts; several turns of one request share it."""


_parts: ContextVar[Parts | None] = ContextVar("flashpatch_grpo_parts", default=None)
_of_request: WeakValueDictionary[str, Parts] = WeakValueDictionary()


async def on_generate_whole(original, self, request_id: Any, **arguments: Any) -> Any:
    """Collect the parts of ``FullyAsyncLLMServerClient.generate``, which repeats what updates stop."""
    parts = _of_request.setdefault(str(request_id), Parts())
    token = _parts.set(parts)
    try:
        output = await original(self, request_id=request_id, **arguments)
    finally:
        _parts.reset(token)
    output.extra_fields[KEY] = parts
    return output


async def on_generate_part(original, self, request_id: Any, **arguments: Any) -> Any:
    """Add what one call of a server generated, with the version that the server names."""
    output = await original(self, request_id=request_id, **arguments)
    parts, resumed = _parts.get(), output.extra_fields.pop(RESUMED, [])
    if parts is not None and output.token_ids:
        for version, tokens in resumed:
            add_version(parts, version, tokens)
        rest = len(output.token_ids) - sum(tokens for _, tokens in resumed)
        if rest:
            add_version(parts, output.extra_fields.get("global_steps"), rest)
    return output


_patch = partial(
    Patch,
    requires="verl>=0.9",
    evidence="optional",  # only asynchronous trainers resume requests
    why="verl keeps a response's first and last version, and of later turns nothing: how old a token is cannot be "
    "said, nor bounded.",
    remove_when="verl records the version of each token.",
)

WHOLE = _patch(
    id="grpo.verl.generate_whole",
    targets=(f"{CLIENT}:FullyAsyncLLMServerClient.generate",),
    wrapper=on_generate_whole,
    needs=("grpo.verl.generate_part",),
    contract=Contract(params=("request_id",), mentions=("final_output.extra_fields",)),
    how=f'Adds the list of versions and lengths to a response\'s extra fields, as "{KEY}".',
)

PART = _patch(
    id="grpo.verl.generate_part",
    targets=(f"{CLIENT}:LLMServerClient.generate",),
    wrapper=on_generate_part,
    contract=Contract(params=("request_id",), mentions=("output.extra_fields",)),
    how="Records version and length of what each call to a server returns.",
)
