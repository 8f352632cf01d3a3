"""A generation whose server died or does not answer goes to another one, exactly once."""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.grpo")

CLIENT = "verl.workers.rollout.llm_server"
ID = "grpo.verl.resubmit"

_servers: ContextVar[list[str] | None] = ContextVar("flashpatch_grpo_servers", default=None)
"""The servers that the generation under way was given, in order."""


async def on_acquire(original, self, request_id: str, **extra: Any) -> tuple[str, Any]:
    """Around ``LLMServerClient._acquire_server``: remember which server it was."""
    name, handle = await original(self, request_id, **extra)
    seen = _servers.get()
    if seen is not None:
        seen.append(name)
    return name, handle


async def on_generate(original, self, request_id: str, **arguments: Any) -> Any:
    """Around ``LLMServerClient.generate``.

    Raises:
        PatchError: the second server was lost as well; the first cause is attached.
        Exception: whatever else a server answers.
    """
    options = engine.options("grpo")
    if not options["resubmit"]:
        return await original(self, request_id, **arguments)
    patience = options["patience"] or None
    seen: list[str] = []
    reset = _servers.set(seen)
    try:
        try:
            return await asyncio.wait_for(original(self, request_id, **arguments), patience)
        except Exception as error:
            why = lost(error)
            if why is None or not seen:
                raise
            await _report(self, seen[-1], isinstance(error, TimeoutError), options["rest"])
            logger.warning("request %s: server %s %s; it goes to another one", request_id, seen[-1], why)
            ledger.note(resubmitted=ledger.notes().get("resubmitted", 0) + 1)
            first = error
        try:
            return await asyncio.wait_for(original(self, request_id, **arguments), patience)
        except Exception as error:
            why = lost(error)
            if why is None:
                raise
            await _report(self, seen[-1], isinstance(error, TimeoutError), options["rest"])
            raise PatchError(
                f"request {request_id} got no answer from two servers: {', '.join(seen)}.",
                patch=ID,
                target=f"{CLIENT}:LLMServerClient.generate",
                advice="Look at the servers' logs; patience = 0 waits for ever.",
            ) from first
    finally:
        _servers.reset(reset)


def lost(error: BaseException) -> str | None:
    """Why a server is lost, if that is what an error says; None for an error of the request itself."""
    from ray.exceptions import RayActorError, RayTaskError

    if isinstance(error, TimeoutError):
        return "did not answer in time"
    if isinstance(error, RayActorError):
        return f"died ({type(error).__name__})"
    if isinstance(error, RayTaskError) and "EngineDeadError" in type(error).__name__ + str(error.cause):
        return "has a dead engine"
    return None


async def _report(client: Any, server: str, slow: bool, rest: float) -> None:
    """Tell the balancer, ours or verl's own: a dead server leaves the pool, a slow one rests where that is known."""
    balancer = client._load_balancer
    if not slow:
        await balancer.remove_servers.remote([server])
    elif hasattr(balancer, "rest_server"):
        await balancer.rest_server.remote(server, rest)


_COMMON = dict(
    requires="verl>=0.9",
    evidence="fault",
    tested=("0.9.1",),
    why="When a rollout server dies, verl keeps sending requests to it, and the samples of each are lost; when one "
    "hangs, so does the step.",
    remove_when="verl takes dead servers out of its balancer and repeats their requests.",
)

ACQUIRE = Patch(
    id="grpo.verl.acquire",
    targets=(f"{CLIENT}:LLMServerClient._acquire_server",),
    wrapper=on_acquire,
    contract=Contract(params=("request_id",), mentions=("self._load_balancer",)),
    how="Remembers which server a request was given.",
    **_COMMON,
)

GENERATE = Patch(
    id=ID,
    targets=(f"{CLIENT}:LLMServerClient.generate",),
    wrapper=on_generate,
    needs=("grpo.verl.acquire",),
    contract=Contract(params=("request_id",), exists=(f"{CLIENT}:LLMServerClient._release_server",)),
    how="Takes the server out of the balancer and repeats the request once on another; with the option patience, "
    "also when it does not answer in time. A result is delivered once.",
    **_COMMON,
)
