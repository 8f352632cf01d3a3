"""Balance verl's requests by outstanding tokens, below a threshold, with back-pressure."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashpatch.patches.grpo.routing.lengths import Conversation, Conversations, Digest, Lengths, digest
from flashpatch.patches.grpo.routing.order import Arrival, LongestFirst, Order
from flashpatch.patches.grpo.routing.pool import Pool
from flashpatch.patches.grpo.routing.wait_queue import Places, RequestLost, Wait

EMPTY = "No available servers in load balancer"
"""verl's own message, on which its asynchronous client waits."""


@dataclass(slots=True)
class _Held:
    """Hold a generation on a server: its ticket, conversation, when it began, and for which client."""

    ticket: int
    conversation: Conversation
    began: float
    client: str | None


class TokenBalancer:
    """Implement verl's ``RequestLoadBalancer`` (``verl/workers/rollout/router.py``), an async Ray actor.

    A request goes to the server with the fewest outstanding tokens: its prompt and the response it may have.
    Turns of one conversation stay on one server, as in verl, unless that is at its threshold. A server that has had
    the same prompt is preferred while it is at most that prompt fuller than another. If all are at their thresholds,
    `acquire_server` waits.

    Args:
        servers: server id to actor handle.
        most: threshold of a server in requests; 0 for none.
        longest_first: of those that wait, the longest predicted one is next; else the first come."""

    def __init__(self, servers: Mapping[str, Any], most: int = 0, longest_first: bool = True) -> None:
        self._pool = Pool(most)
        self._lengths = Lengths()
        self._order: Order[Wait] = LongestFirst(self._lengths, time.monotonic) if longest_first else Arrival()
        self._places = Places(self._pool, self._order)
        self._conversations = Conversations()
        self._handles: dict[str, Any] = {}
        self._tickets = itertools.count()
        self._held: dict[tuple[str, str], deque[_Held]] = {}
        self._rests: dict[str, int] = {}
        self._dead: set[str] = set()
        self._add(servers)

    async def acquire_server(
        self,
        request_id: str,
        prompt_ids: Any = None,
        sampling_params: Mapping[str, Any] | None = None,
        prompt_digest: Digest | None = None,
        client: str | None = None,
    ) -> tuple[str, Any]:
        """Return a server for one generation, and its handle; wait while all are at their thresholds.

        Args:
            request_id: the conversation.
            prompt_ids: the prompt, if there is no ``prompt_digest`` of it.
            sampling_params: its limit of tokens bounds what is expected.
            client: the client that holds the place, see `forget_client`.

        Raises:
            RuntimeError: there is no server at all, with verl's message; or the client has died meanwhile."""
        asked = prompt_digest or digest(prompt_ids)
        tokens, conversation = asked[1], self._conversations.begin(request_id, asked)
        ticket, name = next(self._tickets), None
        while name is None or self._pool.where(ticket) != name:
            if not self._handles:
                raise RuntimeError(EMPTY)
            try:
                name = await self._places.take(
                    ticket,
                    lambda: self.cost(tokens, sampling_params, conversation),
                    request_id,
                    shared=conversation.prompt if conversation.prompt_tokens else None,
                    saving=min(tokens, conversation.prompt_tokens),
                    prompt=conversation.key,
                )
            except RequestLost:
                continue  # all servers left while it waited
        if client in self._dead:
            self._pool.release(ticket)
            self._places.serve()
            raise RuntimeError(f"request {request_id} is of a client that died")
        held = _Held(ticket, conversation, time.monotonic(), client)
        self._lengths.started(conversation.key, held.began)
        self._held.setdefault((name, request_id), deque()).append(held)
        return name, self._handles[name]

    def cost(
        self, prompt_tokens: int, sampling_params: Mapping[str, Any] | None, conversation: Conversation
    ) -> int:
        """Return the tokens of the prompt and the expected tokens of the response, of which an aborted turn
        has some already."""
        params = sampling_params or {}
        limit = params.get("max_tokens") or params.get("max_new_tokens")
        expected = self._lengths.expect(conversation.key, time.monotonic()) - conversation.tokens
        return prompt_tokens + max(1, int(expected if limit is None else min(expected, limit)))

    async def release_server(
        self, server_id: str, request_id: str | None = None, tokens: int | None = None, complete: bool = True
    ) -> None:
        """Release a server after a generation has ended or failed.

        Args:
            server_id, request_id: as acquired.
            tokens: of the response; None when there is none.
            complete: False when the generation was aborted and will go on."""
        generations = self._held.get((server_id, request_id))
        if not generations:
            return
        held = generations.popleft()
        if not generations:
            del self._held[server_id, request_id]
        self._learn(held, tokens, complete)
        self._pool.release(held.ticket)
        self._places.serve()

    async def forget_client(self, client: str) -> int:
        """Give back the places of a client that died, now and as its waiting requests get some; return those of now."""
        self._dead.add(client)
        released = 0
        for key, generations in list(self._held.items()):
            lost = [held for held in generations if held.client == client]
            for held in lost:
                generations.remove(held)
                self._learn(held, None, False)
                self._pool.release(held.ticket)
            released += len(lost)
            if not generations:
                del self._held[key]
        self._places.serve()
        return released

    def _learn(self, held: _Held, tokens: int | None, complete: bool) -> None:
        """Take in what a generation that has left its server tells about its prompt."""
        conversation = held.conversation
        self._lengths.stopped(conversation.key, held.began)
        if tokens is None:
            return
        seconds = time.monotonic() - held.began if complete and not conversation.tokens else 0.0
        conversation.tokens += tokens
        conversation.over = complete
        if not complete:
            return
        self._lengths.ended(conversation.key, conversation.tokens, seconds)
        self._order.changed(conversation.key)

    async def rest_server(self, server_id: str, seconds: float) -> None:
        """Give a server no new requests for a while, after it did not answer one in time."""
        self._pool.suspend(server_id)
        mark = self._rests[server_id] = self._rests.get(server_id, 0) + 1

        def back() -> None:
            if self._rests.get(server_id) == mark:
                self._pool.resume(server_id)
                self._places.serve()

        asyncio.get_running_loop().call_later(seconds, back)

    def require_acquire_fields(self) -> list[str]:
        """Name the fields that verl's client must send."""
        return ["prompt_digest", "sampling_params", "client"]

    def require_release_fields(self) -> list[str]:
        """Name them for a release; verl's own client knows the first alone."""
        return ["request_id", "tokens", "complete"]

    async def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Add idle servers; waiting requests may go to them."""
        self._add(servers)

    async def remove_servers(self, server_ids: list[str]) -> None:
        """Remove servers that left or died; their generations no longer count."""
        for name in server_ids:
            self._pool.remove(name)
            self._handles.pop(name, None)
            self._forget(name)
        if not self._handles:
            # No server is left: waiting callers ask again and get the error.
            self._places.end()
        self._places.serve()

    def get_inflight_count(self, server_id: str) -> int:
        worker = self._pool.workers.get(server_id)
        return len(worker.requests) if worker else 0

    def get_all_servers(self) -> list[str]:
        return list(self._handles)

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget which conversations belong to which server."""
        return {"cleared_entries": self._pool.forget_prefixes(), "server_loads": self._inflight()}

    def get_status(self) -> dict[str, Any]:
        """Return verl's fields, and ``tokens``: outstanding tokens by server; ``waiting``: requests without a
        place; ``responses``: number of those whose lengths were learned."""
        inflight = self._inflight()
        return {
            "servers": inflight,
            "total_inflight": sum(inflight.values()),
            "active_servers": len(inflight),
            "registered_handles": list(self._handles),
            "tokens": self._pool.loads(),
            "waiting": self._places.waiting,
            "responses": self._lengths.responses,
        }

    def get_total_inflight(self) -> int:
        return sum(self._inflight().values())

    def _inflight(self) -> dict[str, int]:
        return {name: len(worker.requests) for name, worker in self._pool.workers.items()}

    def _add(self, servers: Mapping[str, Any]) -> None:
        for name, handle in servers.items():
            self._forget(name)
            self._pool.add(name)
            self._handles[name] = handle
        self._places.serve()

    def _forget(self, name: str) -> None:
        for key in [key for key in self._held if key[0] == name]:
            for held in self._held.pop(key):
                self._learn(held, None, False)
