"""Go on with a generation on another server, once, when its server died or cannot be reached; report its length."""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.tally import count
from flashpatch.patches.grpo.routing.lengths import digest

logger = logging.getLogger("flashpatch.grpo")

CLIENT = "verl.workers.rollout.llm_server"
REST = 30.0
"""Seconds for which a server that Ray could not reach gets no new requests."""
UNREACHED = "cannot be reached"

patches = Patches(
    "grpo",
    "verl>=0.9",
    evidence="fault",
    why="When a rollout server dies, verl keeps sending requests to it, and the samples of each are lost.",
    remove_when="verl takes dead servers out of its balancer and repeats their requests.",
)


class _Attempt:
    """Hold one attempt of a generation: its server, once it has one, and the server's release, which waits for the
    length of the response."""

    def __init__(self, prompt_ids: Any = None) -> None:
        self.prompt_ids = prompt_ids
        self.server: str | None = None
        self.open = True
        self.released: tuple[str, str | None] | None = None

    def close(self, client: Any, output: Any = None) -> None:
        """Send the release, with the length of the response if there is one; later ones go out at once."""
        self.open = False
        if self.released is None:
            return
        server, request_id = self.released
        fields = {"request_id": request_id}
        tokens = getattr(output, "token_ids", None)
        if tokens is not None:
            complete = getattr(output, "stop_reason", None) not in ("aborted", "abort")
            fields |= {"tokens": len(tokens), "complete": complete}
        known = client._lb_require_release_fields or ()
        fields = {name: value for name, value in fields.items() if name in known}
        client._load_balancer.release_server.remote(server_id=server, **fields)


_attempt: ContextVar[_Attempt | None] = ContextVar("flashpatch_grpo_attempt", default=None)


@patches.wrap(f"{CLIENT}:LLMServerClient._acquire_server", relies_on="self._load_balancer")
async def acquire_server(original, self, request_id: str, **extra: Any) -> tuple[str, Any]:
    """Record which server a request was sent to.

    A balancer cannot know that a client which waited for a place was cancelled: a place that comes too late
    is given back, or it would be taken for ever. Of the prompt, grpo's balancer gets a digest alone."""
    attempt = _attempt.get()
    if engine.options("grpo")["router"]:
        extra["prompt_digest"] = digest(attempt.prompt_ids if attempt else extra.get("prompt_ids"))
        extra["client"] = _this_client()
    asked = asyncio.ensure_future(original(self, request_id, **extra))

    def give_back(done: asyncio.Future[tuple[str, Any]]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._release_server(done.result()[0], request_id=request_id)

    try:
        name, handle = await asyncio.shield(asked)
    except asyncio.CancelledError:
        asked.add_done_callback(give_back)
        raise
    if attempt is not None:
        attempt.server = name
    return name, handle


def _this_client() -> str | None:
    """Return the id of the actor that this process is, such as an agent loop worker; None outside actors."""
    import ray

    return ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None


@patches.wrap(
    f"{CLIENT}:LLMServerClient._release_server",
    relies_on="self._lb_require_release_fields",
    evidence="optional",
    why="verl's client tells the balancer that a generation has ended, and not how long it was; the lengths of a "
    "prompt's responses are what the lengths of its other responses can be predicted from.",
    remove_when="verl sends the length of the response with the release.",
)
def release_server(original, self, server_id: str, request_id: str | None = None) -> None:
    """Send the release when the response is there, with its length and whether it was aborted, to a balancer that asks for
    them."""
    attempt = _attempt.get()
    if attempt is None or not attempt.open:
        original(self, server_id, request_id=request_id)
    else:
        attempt.released = server_id, request_id


@patches.wrap(
    f"{CLIENT}:LLMServerClient.generate",
    relies_on=(
        f"{CLIENT}:LLMServerClient._release_server",
        "verl.workers.rollout.replica:TokenOutput.token_ids",
        "verl.workers.rollout.replica:TokenOutput.stop_reason",
    ),
)
async def generate(original, self, request_id: str, **arguments: Any) -> Any:
    """Repeat a request once on another server if the first one died, which is removed from the balancer, or cannot be reached.

    A result is delivered once, and the balancer is told how long the response is.

    Raises:
        PatchError: the second server was lost as well; the first cause is attached.
        Exception: whatever else a server answers."""
    options = engine.options("grpo")
    servers: list[str | None] = []
    first: Exception | None = None
    while True:
        attempt = _Attempt(arguments.get("prompt_ids"))
        reset = _attempt.set(attempt)
        output = None
        try:
            output = await original(self, request_id, **arguments)
            return output
        except Exception as error:
            attempt.close(self)
            why = lost(error)
            if why is None or attempt.server is None or not options["resubmit"]:
                raise
            servers.append(attempt.server)
            await _report(self, attempt.server, why == UNREACHED)
            if first is not None:
                raise PatchError(
                    f"request {request_id} got no answer from two servers: {', '.join(map(str, servers))}.",
                    **patches.at(generate),
                    advice="Look at the servers' logs.",
                ) from first
            first = error
            logger.warning(
                "request %s: server %s %s; it goes to another one", request_id, attempt.server, why
            )
            count("resubmitted")
        finally:
            _attempt.reset(reset)
            if attempt.open:
                attempt.close(self, output)


def lost(error: BaseException) -> str | None:
    """Return why a server is lost, if the error means that; None for an error of the request itself."""
    from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

    if isinstance(error, ActorUnavailableError):
        return UNREACHED
    if isinstance(error, RayActorError):
        return f"died ({type(error).__name__})"
    if isinstance(error, RayTaskError) and "EngineDeadError" in type(error).__name__ + str(error.cause):
        return "has a dead engine"
    return None


async def _report(client: Any, server: str, may_live: bool) -> None:
    """Report a lost server to the balancer, grpo's or verl's own.

    A dead server is removed; one that may live gets no new requests for a while, if the balancer can."""
    balancer = client._load_balancer
    if not may_live:
        await balancer.remove_servers.remote([server])
    elif hasattr(balancer, "rest_server"):
        await balancer.rest_server.remote(server, REST)
