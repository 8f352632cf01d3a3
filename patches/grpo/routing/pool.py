"""Choose the worker for the next request: the fewest outstanding tokens, below its threshold.

It has no clock, network or event loop: callers report every event and ask for every decision.
"""

from __future__ import annotations

import heapq
import math
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
    mark: int = 0

    @property
    def shut(self) -> bool:
        """Whether it takes no request at all, until one is released or it is resumed."""
        return self.resting or 0 < self.most <= len(self.requests)

    def takes(self, tokens: int) -> bool:
        """Whether a request fits under the thresholds; one with more tokens than that fits an idle worker."""
        if self.shut:
            return False
        return not self.cap or not self.tokens or self.tokens + tokens <= self.cap


class Pool:
    """Track workers and the requests outstanding on each.

    Args:
        cap: default threshold of a worker in tokens; 0 for none.
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
        self._heap: list[tuple[int, int, str]] = []  # stale entries are dropped when met
        self._marks = 0
        self._highest = 0.0  # threshold in tokens that any worker has had
        self._prefixes: OrderedDict[Hashable, str] = OrderedDict()
        self._shared: OrderedDict[Hashable, list[Worker]] = OrderedDict()

    def add(self, name: str, cap: int | None = None) -> list[Hashable]:
        """Add an idle worker. An earlier one of that name is removed first.

        Returns:
            the requests that were outstanding on it.
        """
        orphans = self.remove(name)
        worker = self.workers[name] = Worker(name, self.cap if cap is None else cap, self.most)
        self._highest = max(self._highest, worker.cap or math.inf)
        self._touch(worker)
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
        if name in self.workers and self.workers[name].resting:
            self.workers[name].resting = False
            self._touch(self.workers[name])

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
        self._touch(chosen)
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
        self._touch(worker)
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
        """Return the emptiest worker that takes the request; thresholds may differ between workers."""
        passed, found = [], None
        while self._heap:
            entry = self._heap[0]
            worker = self.workers.get(entry[2])
            if worker is None or worker.mark != entry[1] or worker.shut:
                heapq.heappop(self._heap)  # of a past load, or it is entered again when it opens
            elif worker.tokens and worker.tokens + tokens > self._highest:
                break  # all that follow are as full
            elif not worker.takes(tokens):
                passed.append(heapq.heappop(self._heap))
            else:
                found = worker
                break
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def _touch(self, worker: Worker) -> None:
        self._marks += 1
        worker.mark = self._marks
        if len(self._heap) > 8 * len(self.workers) + 64:
            self._heap = [(one.tokens, one.mark, one.name) for one in self.workers.values()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (worker.tokens, worker.mark, worker.name))
