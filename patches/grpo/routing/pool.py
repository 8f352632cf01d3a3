"""Choose the worker for the next request: the fewest outstanding tokens, below its threshold.

It has no clock, network or event loop: callers report every event and ask for every decision."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

_REMEMBERED = 10_000
"""Prefixes, and beginnings in common, whose workers are remembered."""


def threshold(slots: int) -> int:
    """Return the request limit of a server: its slots plus 1/16, so that slots refill at once, and few wait where no order
    can be chosen."""
    return slots + -(-slots // 16)


@dataclass(eq=False)
class Worker:
    """Hold the state of one worker.

    Attributes:
        name: its name.
        most: largest number of outstanding requests; 0 for no threshold.
        tokens: outstanding tokens.
        requests: request to its tokens, of those outstanding here.
        resting: it gets no new requests, see `Pool.suspend`."""

    name: str
    most: int = 0
    tokens: int = 0
    requests: dict[Hashable, int] = field(default_factory=dict)
    resting: bool = False

    @property
    def free(self) -> bool:
        """Whether it takes another request."""
        return not self.resting and not 0 < self.most <= len(self.requests)


class Pool:
    """Track workers and the requests outstanding on each.

    Args:
        most: threshold of a worker in requests; 0 for none. As many as it serves at once, and some to follow."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.workers: dict[str, Worker] = {}
        self._holder: dict[Hashable, str] = {}
        self._prefixes: OrderedDict[Hashable, str] = OrderedDict()
        self._shared: OrderedDict[Hashable, list[Worker]] = OrderedDict()

    def add(self, name: str) -> list[Hashable]:
        """Add an idle worker. An earlier one of that name is removed first; return the requests that were outstanding
        on it."""
        orphans = self.remove(name)
        self.workers[name] = Worker(name, self.most)
        return orphans

    def remove(self, name: str) -> list[Hashable]:
        """Remove a worker; return its outstanding requests, which the pool forgets."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return []
        for request in worker.requests:
            del self._holder[request]
        return list(worker.requests)

    def suspend(self, name: str) -> None:
        """Give a worker no new requests until `resume`."""
        if name in self.workers:
            self.workers[name].resting = True

    def resume(self, name: str) -> None:
        if name in self.workers:
            self.workers[name].resting = False

    def acquire(
        self,
        request: Hashable,
        tokens: int,
        prefix: Hashable = None,
        shared: Hashable = None,
        saving: int = 0,
    ) -> str | None:
        """Choose a worker and count the request on it; None when all are full or suspended.

        Args:
            request: must not be outstanding already.
            tokens: what it will cost, such as prompt and expected response; at least 1.
            prefix: requests with the same one go to the same worker, where it is cached.
            shared: a beginning that it has in common with other requests, such as the prompt of a group. A worker
                that has had one of them is preferred, unless it is fuller than another by more than ``saving``.
            saving: tokens, less than ``tokens``, that it does not cost on such a worker."""
        holders = self._shared.get(shared, []) if shared is not None else []
        chosen = self._known(prefix) or self._emptiest(holders, saving)
        if chosen is None:
            return None
        if chosen in holders:
            tokens = max(1, tokens - saving)
        chosen.requests[request] = tokens
        chosen.tokens += tokens
        self._holder[request] = chosen.name
        if prefix is not None:
            _remember(self._prefixes, prefix, chosen.name)
        if shared is not None and chosen not in holders:
            alive = [one for one in holders if one is self.workers.get(one.name)]
            _remember(self._shared, shared, [*alive, chosen])
        return chosen.name

    def release(self, request: Hashable) -> bool:
        """Release an outstanding request; False when it was not, as after its worker was removed."""
        name = self._holder.pop(request, None)
        if name is None:
            return False
        worker = self.workers[name]
        worker.tokens -= worker.requests.pop(request)
        return True

    def where(self, request: Hashable) -> str | None:
        """Return the worker on which a request is outstanding."""
        return self._holder.get(request)

    def forget_prefixes(self) -> int:
        """Drop all affinity; return the number of prefixes."""
        number = len(self._prefixes)
        self._prefixes.clear()
        self._shared.clear()
        return number

    def loads(self) -> dict[str, int]:
        """Return the outstanding tokens by worker."""
        return {name: worker.tokens for name, worker in self.workers.items()}

    def _known(self, prefix: Hashable) -> Worker | None:
        """Return the worker that has the prefix, if it takes another request."""
        name = self._prefixes.get(prefix) if prefix is not None else None
        worker = self.workers.get(name) if name is not None else None
        return worker if worker is not None and worker.free else None

    def _emptiest(self, holders: list[Worker], saving: int) -> Worker | None:
        """Return the emptiest worker that has the shared beginning, or the emptiest of all if that is better."""
        free = [worker for worker in self.workers.values() if worker.free]
        least = min(free, key=lambda worker: worker.tokens, default=None)
        able = [worker for worker in holders if worker in free]
        best = min(able, key=lambda worker: worker.tokens, default=None)
        return least if best is None or least.tokens + saving < best.tokens else best


def _remember(kept: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > _REMEMBERED:
        kept.popitem(last=False)
