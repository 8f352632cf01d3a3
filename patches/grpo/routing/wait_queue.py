"""Queue requests in front of a pool, first come first served, until a worker takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.routing.pool import Pool


class RequestLost(PatchError):
    """Report a request without a result: its workers died or did not answer, or none took it."""


@dataclass(frozen=True, eq=False)
class _Wait:
    place: asyncio.Future[str]
    request: Hashable
    tokens: int
    prefix: Hashable
    avoid: tuple[str, ...]


class Places:
    """Give waiting requests places on the workers of a pool. All methods belong to one event loop.

    Args:
        pool: whose thresholds are kept. After any change of it that is not made here, call `serve`.
        timeout: seconds a request may wait; None for any time.
    """

    def __init__(self, pool: Pool, timeout: float | None = None) -> None:
        self.pool = pool
        self._timeout = timeout
        self._waits: deque[_Wait] = deque()

    @property
    def waiting(self) -> int:
        """Count the waiting requests."""
        return len(self._waits)

    async def take(
        self, request: Hashable, tokens: int, prefix: Hashable = None, avoid: tuple[str, ...] = ()
    ) -> str:
        """Wait for a worker; the request is counted on it. Arguments as of `Pool.acquire`.

        The worker may be gone when the caller goes on: ``pool.where(request)`` says whether it still counts.

        Raises:
            RequestLost: none took it in time.
            PatchError: see `Pool.acquire`.
        """
        if avoid or not any(not wait.avoid for wait in self._waits):
            name = self.pool.acquire(request, tokens, prefix, avoid)
            if name is not None:
                return name
        wait = _Wait(asyncio.get_running_loop().create_future(), request, tokens, prefix, avoid)
        # What was tried once already came earlier than all that wait.
        (self._waits.appendleft if avoid else self._waits.append)(wait)
        self.serve()
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
            if wait.place.cancelled() and wait in self._waits:
                self._waits.remove(wait)

    def serve(self) -> None:
        """Give places to those that wait, in order; a request that avoids workers does not hold up others."""
        kept: deque[_Wait] = deque()
        while self._waits:
            wait = self._waits.popleft()
            if wait.place.done():
                continue
            try:
                name = self.pool.acquire(wait.request, wait.tokens, wait.prefix, wait.avoid)
            except PatchError as error:
                wait.place.set_exception(error)
                continue
            if name is not None:
                wait.place.set_result(name)
                continue
            kept.append(wait)
            if not wait.avoid:
                break
        kept.extend(self._waits)
        self._waits = kept

    def end(self, why: str) -> None:
        """Fail all waiting requests with the reason."""
        for wait in self._waits:
            if not wait.place.done():
                wait.place.set_exception(_no_place(wait.request, why))
        self._waits.clear()


def _no_place(request: Hashable, why: str) -> RequestLost:
    return RequestLost(
        f"request {request!r} found no worker: {why}.",
        patch="grpo.registry",
        advice="Register workers, or raise their thresholds.",
    )
