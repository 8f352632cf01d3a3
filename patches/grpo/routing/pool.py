"""Choose the worker for the next request: the fewest outstanding tokens, below its threshold.

It has no clock, network or event loop: callers report every event and ask for every decision.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from flashpatch.patches.grpo.errors import refuse


def threshold(slots: int) -> int:
    """Return the request limit of a server: its slots plus 1/16, so that slots refill at once, and few wait where no order
    can be chosen."""
    return slots + -(-slots // 16)


@dataclass(eq=False)
class Worker:
    """Hold the state of one worker.

    Attributes:
        name: its name.
        cap: largest number of outstanding tokens; 0 for no threshold.
        most: largest number of outstanding requests; 0 for no threshold.
        tokens: outstanding tokens.
        requests: request to its tokens, of those outstanding here.
        resting: it gets no new requests, see `Pool.suspend`.
    """

    name: str
    cap: int
    most: int = 0
    tokens: int = 0
    requests: dict[Hashable, int] = field(default_factory=dict)
    resting: bool = False

    def takes(self, tokens: int) -> bool:
        """Whether a request fits under the thresholds; one with more tokens than that fits an idle worker."""
        if self.resting or 0 < self.most <= len(self.requests):
            return False
        return not self.cap or not self.tokens or self.tokens + tokens <= self.cap


class Pool:
    """Track workers and the requests outstanding on each.

    Args:
        cap: threshold of a worker in tokens; 0 for none.
        most: threshold of a worker in requests; 0 for none. As many as it serves at once, and some to follow.
        slack: requests with the same ``prefix`` go to the same worker, where their prefix is cached, unless it is
            so many tokens fuller than the emptiest; None for any difference.
        remembered: number of prefixes remembered.

    Raises:
        PatchError: an argument that cannot be meant.
    """

    def __init__(
        self,
        *,
        cap: int = 0,
        most: int = 0,
        slack: int | None = None,
        remembered: int = 10_000,
    ) -> None:
        if min(cap, most, remembered) < 0 or (slack is not None and slack < 0):
            problem = f"are {cap}, {most}, {slack} and {remembered}."
            refuse("registry", "cap, most, slack, remembered", problem, "Give numbers of at least 0.")
        self.most = most
        self.cap, self.slack, self.remembered = cap, slack, remembered
        self.workers: dict[str, Worker] = {}
        self._holder: dict[Hashable, str] = {}
        self._prefixes: OrderedDict[Hashable, str] = OrderedDict()
        self._shared: OrderedDict[Hashable, list[Worker]] = OrderedDict()

    def add(self, name: str) -> list[Hashable]:
        """Add an idle worker. An earlier one of that name is removed first.

        Returns:
            the requests that were outstanding on it.
        """
        orphans = self.remove(name)
        self.workers[name] = Worker(name, self.cap, self.most)
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
            prefix: what it shares with others, for affinity.
            shared: a beginning that it has in common with other requests, such as the prompt of a group. A worker
                that has had one of them is preferred, unless it is fuller than another by more than ``saving``.
            saving: tokens, less than ``tokens``, that it does not cost on such a worker.

        Raises:
            PatchError: the request is outstanding, or costs nothing.
        """
        if request in self._holder:
            refuse(
                "registry", "request", f"{request!r} is outstanding already.", "Give each request its own id."
            )
        if tokens < 1:
            refuse(
                "registry", "tokens", f"is {tokens} for request {request!r}.", "Count prompt and response."
            )
        chosen = self._known(tokens, prefix)
        holders = self._shared.get(shared, []) if shared is not None else []
        if chosen is None:
            chosen = self._sharing(tokens, saving, holders, self._least(tokens))
        if chosen is None:
            return None
        if chosen in holders:
            tokens = max(1, tokens - saving)
        chosen.requests[request] = tokens
        chosen.tokens += tokens
        self._holder[request] = chosen.name
        if prefix is not None and self.remembered:
            self._prefixes[prefix] = chosen.name
            self._prefixes.move_to_end(prefix)
            if len(self._prefixes) > self.remembered:
                self._prefixes.popitem(last=False)
        if shared is not None and chosen not in holders and self.remembered:
            self._shared[shared] = [*(one for one in holders if one is self.workers.get(one.name)), chosen]
            self._shared.move_to_end(shared)
            if len(self._shared) > self.remembered:
                self._shared.popitem(last=False)
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

    def _known(self, tokens: int, prefix: Hashable) -> Worker | None:
        """Return the worker that has the prefix, if it may take the request and is not too full."""
        name = self._prefixes.get(prefix) if prefix is not None else None
        worker = self.workers.get(name) if name is not None else None
        if worker is None or not worker.takes(tokens):
            return None
        if self.slack is not None:
            least = self._least(tokens)
            if least is not None and worker.tokens > least.tokens + self.slack:
                return None
        return worker

    def _sharing(
        self, tokens: int, saving: int, holders: list[Worker], least: Worker | None
    ) -> Worker | None:
        """Return the emptiest worker that has the shared beginning, or the emptiest of all if that is better."""
        able = [
            worker
            for worker in holders
            if worker is self.workers.get(worker.name) and worker.takes(tokens - saving)
        ]
        best = min(able, key=lambda worker: worker.tokens, default=None)
        if best is None or (least is not None and least.tokens + saving < best.tokens):
            return least
        return best

    def _least(self, tokens: int) -> Worker | None:
        """Return the emptiest worker that takes the request."""
        able = (worker for worker in self.workers.values() if worker.takes(tokens))
        return min(able, key=lambda worker: worker.tokens, default=None)
