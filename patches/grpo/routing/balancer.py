"""Balance verl's requests by outstanding tokens, below thresholds, with back-pressure."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any

from flashpatch.patches.grpo.routing.pool import Pool
from flashpatch.patches.grpo.routing.wait_queue import Places, RequestLost

EMPTY = "No available servers in load balancer"
"""verl's own message, on which its asynchronous client waits."""


class TokenBalancer:
    """Implement verl's ``RequestLoadBalancer`` (``verl/workers/rollout/router.py``), an async Ray actor.

    A request goes to the server with the fewest outstanding tokens: its prompt and the response it may have.
    Turns of one conversation stay on one server, as in verl, unless that is above its threshold or more than
    ``slack`` tokens fuller than the emptiest. Where all are above it, `acquire_server` waits.

    Args:
        servers: server id to actor handle.
        options: ``cap`` and ``most``: thresholds in tokens and requests, 0 for none; ``slack``: see above,
            None for any;
            ``response_tokens``: what a response is expected to have, as a bound on the sampling parameters'
                limit.
    """

    def __init__(self, servers: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._pool = Pool(cap=options["cap"], most=options["most"], slack=options["slack"])
        self._places = Places(self._pool)
        self._response = options["response_tokens"]
        self._handles: dict[str, Any] = {}
        self._tickets = itertools.count()
        self._held: dict[tuple[str, str], deque[int]] = {}
        self._rests: dict[str, int] = {}
        self._add(servers)

    async def acquire_server(
        self, request_id: str, prompt_ids: Any = None, sampling_params: Mapping[str, Any] | None = None
    ) -> tuple[str, Any]:
        """Return a server for one generation, and its handle; wait while all are above their thresholds.

        Raises:
            RuntimeError: there is no server at all, with verl's message.
        """
        ticket, name = next(self._tickets), None
        while name is None or self._pool.where(ticket) != name:
            if not self._handles:
                raise RuntimeError(EMPTY)
            try:
                name = await self._places.take(ticket, self.cost(prompt_ids, sampling_params), request_id)
            except RequestLost:
                continue  # all servers left while it waited
        self._held.setdefault((name, request_id), deque()).append(ticket)
        return name, self._handles[name]

    def cost(self, prompt_ids: Any, sampling_params: Mapping[str, Any] | None) -> int:
        """Return the tokens of the prompt and the expected tokens of the response."""
        params = sampling_params or {}
        limit = params.get("max_tokens") or params.get("max_new_tokens") or self._response
        return max(1, len(prompt_ids or ()) + min(int(limit), self._response))

    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Release a server after a generation has ended or failed."""
        tickets = self._held.get((server_id, request_id))
        if tickets:
            self._pool.release(tickets.popleft())
            if not tickets:
                del self._held[server_id, request_id]
            self._places.serve()

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
        return ["prompt_ids", "sampling_params"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    async def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Add idle servers; waiting requests may go to them."""
        self._add(servers)

    async def remove_servers(self, server_ids: list[str]) -> None:
        """Remove servers that left or died; their generations no longer count."""
        for name in server_ids:
            self._pool.remove(name)
            self._handles.pop(name, None)
            for key in [key for key in self._held if key[0] == name]:
                del self._held[key]
        if not self._handles:
            # No server is left: waiting callers ask again and get the error.
            self._places.end(EMPTY)
        self._places.serve()

    def get_inflight_count(self, server_id: str) -> int:
        worker = self._pool.workers.get(server_id)
        return len(worker.requests) if worker else 0

    def get_all_servers(self) -> list[str]:
        return list(self._handles)

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget which conversations belong to which server."""
        cleared = self._pool.forget_prefixes()
        return {"cleared_entries": cleared, "server_loads": self._inflight()}

    def get_status(self) -> dict[str, Any]:
        """Return verl's fields, and ``tokens``: outstanding tokens by server; ``waiting``: requests without a
        place."""
        inflight = self._inflight()
        return {
            "servers": inflight,
            "total_inflight": sum(inflight.values()),
            "active_servers": len(inflight),
            "registered_handles": list(self._handles),
            "tokens": self._pool.loads(),
            "waiting": self._places.waiting,
        }

    def get_total_inflight(self) -> int:
        return sum(self._inflight().values())

    def _inflight(self) -> dict[str, int]:
        return {name: len(worker.requests) for name, worker in self._pool.workers.items()}

    def _add(self, servers: Mapping[str, Any]) -> None:
        for name, handle in servers.items():
            for key in [key for key in self._held if key[0] == name]:
                del self._held[key]
            self._pool.add(name)
            self._handles[name] = handle
        self._places.serve()
