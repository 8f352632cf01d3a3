"""Queue requests in front of a pool until a worker takes them, in an order that can be chosen."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.routing.order import Arrival, Order
from flashpatch.patches.grpo.routing.pool import Pool


class RequestLost(PatchError):
    """Report a request without a result: its workers died or did not answer, or none took it."""


@dataclass(frozen=True, eq=False)
class Wait:
    """Hold a waiting request; ``place`` is the worker's name once it has one. The rest as of `Pool.acquire`."""

    place: asyncio.Future[str]
    request: Hashable
    tokens: Callable[[], int]
    prefix: Hashable
    avoid: tuple[str, ...]
    shared: Hashable
    saving: int


class Places:
    """Give waiting requests places on the workers of a pool. All methods belong to one event loop.

    Args:
        pool: whose thresholds are kept. After any change of it that is not made here, call `serve`.
        timeout: seconds a request may wait; None for any time.
        order: which request is next; None for first come, first served.
    """

    def __init__(self, pool: Pool, timeout: float | None = None, order: Order[Wait] | None = None) -> None:
        self.pool = pool
        self._timeout = timeout
        self._order: Order[Wait] = Arrival() if order is None else order
        self._retries: deque[Wait] = deque()
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Count the waiting requests."""
        return self._waiting

    async def take(
        self,
        request: Hashable,
        tokens: int | Callable[[], int],
        prefix: Hashable = None,
        avoid: tuple[str, ...] = (),
        *,
        shared: Hashable = None,
        saving: int = 0,
        prompt: Hashable = None,
    ) -> str:
        """Wait for a worker; the request is counted on it.

        The worker may be gone when the caller goes on: ``pool.where(request)`` says whether it still counts.

        Args:
            request, prefix, avoid, shared, saving: see `Pool.acquire`.
            tokens: see there; a function is asked when the request gets its place.
            prompt: what the order knows it by.

        Raises:
            RequestLost: none took it in time.
            PatchError: see `Pool.acquire`.
        """
        cost = tokens if callable(tokens) else lambda: tokens
        wait = Wait(asyncio.get_running_loop().create_future(), request, cost, prefix, avoid, shared, saving)
        if avoid:
            self._retries.appendleft(wait)  # what was tried once already came earlier than all that wait
        else:
            self._order.push(wait, prompt)
        self.serve()
        if wait.place.done():
            return wait.place.result()
        self._waiting += 1
        try:
            return await asyncio.wait_for(wait.place, self._timeout)
        except TimeoutError:
            raise _no_place(request, f"none took it within {self._timeout} s") from None
        except asyncio.CancelledError:
            if wait.place.done() and not wait.place.cancelled():
                self.pool.release(request)
                self.serve()
            raise
        finally:
            self._waiting -= 1

    def serve(self) -> None:
        """Give places to those that wait, in order; a request that avoids workers does not hold up others."""
        self._retries = deque(wait for wait in self._retries if not self._place(wait))
        while (wait := self._order.first()) is not None and self._place(wait):
            self._order.drop()

    def _place(self, wait: Wait) -> bool:
        """Find a worker for a request; False when it must go on waiting."""
        if wait.place.done():
            return True  # it was cancelled
        try:
            name = self.pool.acquire(
                wait.request, wait.tokens(), wait.prefix, wait.avoid, wait.shared, wait.saving
            )
        except PatchError as error:
            wait.place.set_exception(error)
            return True
        if name is not None:
            wait.place.set_result(name)
        return name is not None

    def end(self, why: str) -> None:
        """Fail all waiting requests with the reason."""
        for wait in (*self._retries, *self._order):
            if not wait.place.done():
                wait.place.set_exception(_no_place(wait.request, why))
        self.serve()


def _no_place(request: Hashable, why: str) -> RequestLost:
    return RequestLost(
        f"request {request!r} found no worker: {why}.",
        patch="grpo.registry",
        advice="Register workers, or raise their thresholds.",
    )
