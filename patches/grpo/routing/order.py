"""Decide which waiting request comes next: as they came, or the longest predicted response first."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from flashpatch.patches.grpo.routing.lengths import Lengths

T = TypeVar("T")


class Arrival(Generic[T]):
    """Hold waiting requests and serve them as they came; `first` and `drop` look at the next one and take it out."""

    def __init__(self) -> None:
        self._waits: deque[T] = deque()

    def push(self, wait: T, prompt: Hashable = None) -> None:
        self._waits.append(wait)

    def first(self) -> T | None:
        return self._waits[0] if self._waits else None

    def drop(self) -> None:
        self._waits.popleft()

    def changed(self, prompt: Hashable) -> None:
        """Do nothing: the order is that of arrival."""

    def __iter__(self) -> Iterator[T]:
        return iter(self._waits)


class LongestFirst(Generic[T]):
    """Serve the longest predicted response first, so that no long one is left when the others have ended.

    Before that, one response of each prompt of which nothing is known: it tells how long the others will be.
    The predictions of prompts change as responses end (call `changed`) and as they run on; of prompts without
    an ended response, the one that was started first has the longest prediction.

    Args:
        lengths: the predictions.
        clock: gives the time in seconds."""

    def __init__(self, lengths: Lengths, clock: Callable[[], float]) -> None:
        self._lengths, self._clock = lengths, clock
        self._waits: dict[Hashable, deque[T]] = {}
        self._untried: deque[Hashable] = deque()
        self._running: deque[Hashable] = deque()  # in the order of their starts
        self._known: list[tuple[float, int, Hashable]] = []  # heap: minus the prediction, version, prompt
        self._versions: dict[Hashable, int] = {}
        self._version = 0
        self._next: Hashable = None

    def push(self, wait: T, prompt: Hashable) -> None:
        waits = self._waits.get(prompt)
        if waits is None:
            self._waits[prompt] = deque([wait])
            self._file(prompt)
        else:
            waits.append(wait)

    def changed(self, prompt: Hashable) -> None:
        """Predict anew, after a response of this prompt has ended."""
        if prompt in self._waits:
            self._file(prompt)

    def first(self) -> T | None:
        prompt = self._choose()
        if prompt is None:
            return None
        self._next = prompt
        return self._waits[prompt][0]

    def drop(self) -> None:
        """Take out what `first` returned."""
        prompt = self._next
        waits = self._waits[prompt]
        waits.popleft()
        if self._untried and self._untried[0] == prompt:
            self._untried.popleft()
            self._running.append(prompt)
        if not waits:
            del self._waits[prompt]
            self._versions.pop(prompt, None)

    def __iter__(self) -> Iterator[T]:
        return (wait for waits in self._waits.values() for wait in waits)

    def _file(self, prompt: Hashable) -> None:
        """Put a prompt where its next request is found."""
        if self._lengths.known(prompt):
            self._version += 1
            self._versions[prompt] = self._version
            entry = (-self._lengths.expect(prompt, self._clock()), self._version, prompt)
            heapq.heappush(self._known, entry)
        elif self._lengths.running(prompt):
            self._running.append(prompt)
        else:
            self._untried.append(prompt)

    def _choose(self) -> Hashable:
        while self._untried:
            prompt = self._untried[0]
            if prompt in self._waits and not self._lengths.known(prompt):
                return prompt
            self._untried.popleft()
        while self._running and (
            self._running[0] not in self._waits or self._lengths.known(self._running[0])
        ):
            self._running.popleft()
        while self._known and self._versions.get(self._known[0][2]) != self._known[0][1]:
            heapq.heappop(self._known)
        if not self._known or not self._running:
            return self._running[0] if self._running else self._known[0][2] if self._known else None
        longest = self._lengths.expect(self._running[0], self._clock())
        return self._running[0] if longest >= -self._known[0][0] else self._known[0][2]


Order = Arrival[T] | LongestFirst[T]
