"""Report the tokens of running requests from verl's vLLM server to the journal."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from flashpatch import engine
from flashpatch.patches.grpo.routing import journal
from flashpatch.record import Contract, Patch

SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"
ENGINE = "vllm.v1.engine.async_llm:AsyncLLM"
_server: ContextVar[Any] = ContextVar("flashpatch_grpo_server", default=None)
"""verl's server whose request is being handed to the engine."""


async def on_server_generate(original, self, *args: Any, **arguments: Any) -> Any:
    """Let `on_engine_generate` know whose request it gets."""
    token = _server.set(self)
    try:
        return await original(self, *args, **arguments)
    finally:
        _server.reset(token)


def on_engine_generate(
    original, self, prompt: Any, sampling_params: Any, request_id: str, **more: Any
) -> AsyncIterator[Any]:
    """Report tokens of ``AsyncLLM.generate`` while they come, every ``journal`` of them."""
    outputs = original(self, prompt, sampling_params, request_id, **more)
    server, every = _server.get(), engine.options("grpo")["journal"]
    if server is None or not every:
        return outputs
    to = _journal_of(server)
    return outputs if to is None else reported(outputs, to, request_id, every, server)


async def reported(
    outputs: AsyncIterator[Any], to: Any, request_id: str, every: int, server: Any
) -> AsyncIterator[Any]:
    """Yield the engine's outputs, and tell the journal ``to`` of each ``every`` tokens and of the end.

    Where the engine is ahead of its reader an output holds several steps, so a report may hold more. A response that
    ends before its first report is due is not reported.
    """
    sent = 0
    async for output in outputs:
        if output.outputs:
            one = output.outputs[0]
            new = len(one.token_ids) - sent
            ends = one.finish_reason in ("stop", "length")
            if new and (new >= every or (ends and sent)):
                tokens = list(one.token_ids[sent:])
                to.add.remote(
                    request_id,
                    sent,
                    tokens,
                    _logprobs(one, sent, tokens),
                    getattr(server, "global_steps", None),
                    "completed" if ends else None,
                )
                sent += new
        yield output


def _logprobs(one: Any, sent: int, tokens: list[int]) -> list[float] | None:
    if one.logprobs is None:
        return None
    found = one.logprobs[sent : sent + len(tokens)]
    return [at[token].logprob for token, at in zip(tokens, found, strict=True)]


def _journal_of(server: Any) -> Any:
    """Return the journal's handle, looked up once per server."""
    if not hasattr(server, "_flashpatch_grpo_journal"):
        server._flashpatch_grpo_journal = journal.find()
    return server._flashpatch_grpo_journal


_patch = functools.partial(
    Patch,
    evidence="optional",
    scope=frozenset({"driver"}),
    why="When a rollout server dies, what it had generated is lost: its requests begin again from their prompts.",
    remove_when="verl keeps the tokens of running requests outside the server.",
)

SERVER_GENERATE = _patch(
    id="grpo.verl_vllm.generate",
    targets=(f"{SERVER}.generate",),
    requires="verl>=0.9",
    wrapper=on_server_generate,
    contract=Contract(
        params=("prompt_ids", "sampling_params", "request_id"),
        mentions=("self.engine.generate", "self.global_steps"),
    ),
    how="Notes which server a request belongs to, for grpo.vllm.generate.",
)

ENGINE_GENERATE = _patch(
    id="grpo.vllm.generate",
    targets=(f"{ENGINE}.generate",),
    requires="vllm>=0.24",
    wrapper=on_engine_generate,
    contract=Contract(params=("prompt", "sampling_params", "request_id")),
    how="With the option journal, reports tokens to an actor of Ray outside the server while they come.",
)
