"""Route requests to a pool of workers so that each request ends exactly once.

After async-grpo's ``vllm_registry.py``, which picks the least-loaded worker; but a request whose worker dies,
hangs or leaves is given to another one, and a request that cannot be served ends with an error that says why.
A plain asyncio object; `flashpatch.patches.grpo.standalone.registry_actor` makes a Ray actor of it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any

from flashpatch.patches.grpo.errors import refuse
from flashpatch.patches.grpo.routing.pool import Pool
from flashpatch.patches.grpo.routing.wait_queue import Places, RequestLost

__all__ = ["Registry", "RequestLost", "Send", "WorkerLost"]

Send = Callable[[Any, Any], Awaitable[Any]]
"""``send(handle, payload)`` gives the worker's answer. It raises `WorkerLost` (or ``ConnectionError``,
``EOFError``) when the worker is gone, and anything else when the worker answered that the request is at
fault."""


class WorkerLost(ConnectionError):
    """Report a lost worker; the request may be sent to another."""


@dataclass
class _Link:
    """A worker's handle; a future that says to all its requests why it is lost; whether it answers no
    pings."""

    handle: Any
    gone: asyncio.Future[str]
    hung: bool = False


class Registry:
    """Route requests of one pool.

    Args:
        send: how a request reaches a worker.
        cap, most, affinity, slack: see `flashpatch.patches.grpo.routing.pool.Pool`. Above their thresholds,
            workers get nothing and `submit` waits: that is the back-pressure.
        timeout: seconds a worker may take for one request before it counts as slow: the request goes to
            another worker, and the slow one gets nothing new for ``rest`` seconds. None for any time.
        rest: see ``timeout``.
        resubmissions: how often a request may go to another worker; 1 is "exactly once more".
        ping: ``await ping(handle)`` returns while a worker is alive; None for no heartbeat.
        heartbeat, grace: seconds between pings, and without an answer until a worker counts as hung. It rests
            then, its requests go elsewhere, and it is taken back when it answers again.
        queue_timeout: seconds a request may wait for a worker that takes it, before it ends with an error;
            None for any time.

    Raises:
        PatchError: an argument that cannot be meant.
    """

    def __init__(
        self,
        send: Send,
        *,
        cap: int = 0,
        most: int = 0,
        affinity: bool = True,
        slack: int | None = None,
        timeout: float | None = None,
        rest: float = 5.0,
        resubmissions: int = 1,
        ping: Callable[[Any], Awaitable[Any]] | None = None,
        heartbeat: float = 1.0,
        grace: float = 3.0,
        queue_timeout: float | None = None,
    ) -> None:
        if (
            resubmissions < 0
            or min(heartbeat, grace) <= 0
            or rest < 0
            or (timeout is not None and timeout <= 0)
        ):
            problem = f"are {timeout}, {rest}, {resubmissions}, {heartbeat} and {grace}."
            refuse(
                "registry", "timeout, rest, resubmissions, heartbeat, grace", problem, "Give positive times."
            )
        self.pool = Pool(cap=cap, most=most, affinity=affinity, slack=slack)
        self._places = Places(self.pool, queue_timeout)
        self.counts: Counter[str] = Counter()
        self._send, self._ping = send, ping
        self._timeout, self._rest, self._resubmissions = timeout, rest, resubmissions
        self._heartbeat, self._grace = heartbeat, grace
        self._links: dict[str, _Link] = {}
        self._ids = itertools.count()
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def register(self, name: str, handle: Any, cap: int | None = None) -> None:
        """Add a worker, now or again; requests that an earlier one of that name holds go to another
        worker."""
        self._lose(name, "registered anew")
        self.pool.add(name, cap)
        self._links[name] = _Link(handle, asyncio.get_running_loop().create_future())
        if self._ping is not None:
            self._watches[name] = asyncio.create_task(self._watch(name, handle))
        self._places.serve()

    async def remove(self, name: str) -> None:
        """Remove a worker; its requests go to others."""
        self._lose(name, "removed")

    async def submit(
        self, payload: Any, tokens: int, *, request: Hashable = None, prefix: Hashable = None
    ) -> Any:
        """Serve one request; return the worker's answer.

        Args:
            payload: what `send` gets.
            tokens: what it costs, at least 1.
            request: its id, unique among those under way; made up when None.
            prefix: what it shares with others, see `Pool`.

        Raises:
            RequestLost: its workers were lost or too slow, as often as it was tried; or no worker took it in
                time.
            PatchError: the id is under way already, or the cost is not positive.
            Exception: whatever the worker answered for this request.
        """
        key = ("made up", next(self._ids)) if request is None else request
        self.counts["submitted"] += 1
        tried: list[str] = []
        reasons: list[str] = []
        try:
            for attempt in range(self._resubmissions + 1):
                self.counts["resubmitted"] += attempt > 0
                name = ""
                # Between finding a place and getting it, the worker may be lost: that was no attempt.
                while not name or self.pool.where(key) != name:
                    name = await self._places.take(key, tokens, prefix, tuple(tried))
                try:
                    return await self._attempt(name, payload)
                except WorkerLost as lost:
                    tried.append(name)
                    reasons.append(f"{name} {lost}")
                finally:
                    self.pool.release(key)
                    self._places.serve()
            raise RequestLost(
                f"request {key!r} got no answer: {'; '.join(reasons)}.",
                patch="grpo.registry",
                advice="Look at the workers' logs; raise resubmissions or timeout.",
            )
        except BaseException:
            self.counts["failed"] += 1
            raise
        finally:
            self.counts["ended"] += 1

    def status(self) -> dict[str, Any]:
        """Counts since the start (submitted, ended, failed, resubmitted, lost and hung workers), outstanding
        tokens by worker, and how many requests wait for a place."""
        return {"counts": dict(self.counts), "loads": self.pool.loads(), "waiting": self._places.waiting}

    async def close(self) -> None:
        """Release all workers; requests under way end with `RequestLost`."""
        self._resubmissions = 0
        for name in list(self._links):
            self._lose(name, "closed")
        self._places.end("the registry was closed")

    async def _attempt(self, name: str, payload: Any) -> Any:
        """Try the request on one worker.

        Raises:
            WorkerLost: no answer came; the worker was dealt with.
        """
        link = self._links[name]
        gone = link.gone
        answer = asyncio.ensure_future(self._send(link.handle, payload))
        try:
            await asyncio.wait({answer, gone}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if gone.done():
                raise WorkerLost(gone.result())
            self.counts["slow"] += 1
            self._suspend(name, link)
            raise WorkerLost(f"did not answer within {self._timeout} s")
        except (ConnectionError, EOFError) as error:
            if isinstance(error, WorkerLost) and not answer.done():
                raise
            if self._links.get(name) is link:
                self._lose(name, f"was lost: {error or type(error).__name__}")
            raise WorkerLost(f"was lost: {error or type(error).__name__}") from error
        finally:
            if not answer.done():
                answer.cancel()

    def _lose(self, name: str, why: str) -> None:
        """Drop a lost worker and send its requests to others."""
        link = self._links.pop(name, None)
        watch = self._watches.pop(name, None)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()
        if link is None:
            return
        self.counts["lost workers"] += why.startswith("was lost")
        self.pool.remove(name)
        if not link.gone.done():
            link.gone.set_result(why)
        self._places.serve()

    def _suspend(self, name: str, link: _Link) -> None:
        """Suspend a worker for a while, if it was not replaced meanwhile."""
        if self._links.get(name) is not link:
            return
        self.pool.suspend(name)

        def back() -> None:
            if self._links.get(name) is link and not link.hung:
                self.pool.resume(name)
                self._places.serve()

        asyncio.get_running_loop().call_later(self._rest, back)

    async def _watch(self, name: str, handle: Any) -> None:
        """Ping a worker for as long as it is registered."""
        link = self._links[name]
        while self._links.get(name) is link:
            await asyncio.sleep(self._heartbeat)
            try:
                await asyncio.wait_for(self._ping(handle), self._grace)
            except TimeoutError:
                if not link.hung:
                    self._quarantine(name, link)
            except (ConnectionError, EOFError) as error:
                if self._links.get(name) is link:
                    self._lose(name, f"was lost: {error or type(error).__name__}")
                return
            else:
                if link.hung:
                    link.hung = False
                    self.pool.resume(name)
                    self._places.serve()

    def _quarantine(self, name: str, link: _Link) -> None:
        """Suspend a hanging worker without removing it; its requests go to others."""
        link.hung = True
        self.counts["hung workers"] += 1
        self.pool.suspend(name)
        gone, link.gone = link.gone, asyncio.get_running_loop().create_future()
        gone.set_result(f"did not answer pings for {self._grace} s")
