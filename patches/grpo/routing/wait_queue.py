"""Queue requests in front of a pool until a worker takes them, in an order that can be chosen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from flashpatch.patches.grpo.routing.order import Order
from flashpatch.patches.grpo.routing.pool import Pool


class RequestLost(Exception):
    """Report a request without a place: all workers left while it waited."""


@dataclass(frozen=True, eq=False)
class Wait:
    """Hold a waiting request; ``place`` is the worker's name once it has one. The rest as of `Pool.acquire`."""

    place: asyncio.Future[str]
    request: Hashable
    tokens: Callable[[], int]
    prefix: Hashable
    shared: Hashable
    saving: int


class Places:
    """Give waiting requests places on the workers of a pool. All methods belong to one event loop.

    Args:
        pool: whose thresholds are kept. After any change of it that is not made here, call `serve`.
        order: which request is next."""

    def __init__(self, pool: Pool, order: Order[Wait]) -> None:
        self.pool = pool
        self._order = order
        self.waiting = 0

    async def take(
        self,
        request: Hashable,
        tokens: Callable[[], int],
        prefix: Hashable = None,
        *,
        shared: Hashable = None,
        saving: int = 0,
        prompt: Hashable = None,
    ) -> str:
        """Wait for a worker; the request is counted on it.

        The worker may be gone when the caller goes on: ``pool.where(request)`` says whether it still counts.

        Args:
            request, prefix, shared, saving: see `Pool.acquire`.
            tokens: says what it costs, see there, when the request gets its place.
            prompt: what the order knows it by.

        Raises:
            RequestLost: see `end`."""
        wait = Wait(asyncio.get_running_loop().create_future(), request, tokens, prefix, shared, saving)
        self._order.push(wait, prompt)
        self.serve()
        if wait.place.done():
            return wait.place.result()
        self.waiting += 1
        try:
            return await wait.place
        except asyncio.CancelledError:
            if wait.place.done() and not wait.place.cancelled():
                self.pool.release(request)
                self.serve()
            raise
        finally:
            self.waiting -= 1

    def serve(self) -> None:
        """Give places to those that wait, in order."""
        while (wait := self._order.first()) is not None and self._place(wait):
            self._order.drop()

    def _place(self, wait: Wait) -> bool:
        if wait.place.done():
            return True  # it was cancelled
        try:
            name = self.pool.acquire(wait.request, wait.tokens(), wait.prefix, wait.shared, wait.saving)
        except Exception as error:  # a request that cannot be reckoned fails alone
            wait.place.set_exception(error)
            return True
        if name is not None:
            wait.place.set_result(name)
        return name is not None

    def end(self) -> None:
        """Fail all waiting requests."""
        for wait in self._order:
            if not wait.place.done():
                wait.place.set_exception(RequestLost())
        self.serve()
