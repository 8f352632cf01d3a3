"""Train on replicas that have drained, while others still finish a step's rollouts.

Near the end of a step most replicas wait for the longest answers of a few. No request is moved and no server leaves the
balancer: a drained replica stays ready, and a request that reaches it ends the slice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

logger = logging.getLogger("flashpatch.eagle")

POLL_SECONDS = 0.25
CALM_POLLS = 2  # for which a replica must have no request before it trains


class Trainers(Protocol):
    """What the tail needs of `rank_trainers.RankTrainers`."""

    training: tuple[int, ...]

    def train(self, seconds: float, ranks: Sequence[int], steps: int | None) -> bool: ...  # noqa: D102
    def stop(self, limit: float) -> bool: ...  # noqa: D102
    def is_training(self) -> bool: ...  # noqa: D102


class Tail:
    """Give drained replicas' ranks to the trainers, from `begin` to `end`, in a thread of its own.

    Args:
        trainers: of the drafter.
        ranks: of each replica, by the name of its server.
        in_flight: returns the requests in flight by server name, as verl's balancer counts them.
        timeout: seconds after which a process that does not give its device back is killed.

    Attributes:
        seconds: of training since `begin`.
        slices: since `begin`.
        interrupted: slices since `begin` that a request ended.
        stop_seconds: longest time since `begin` until a slice that was told to stop had left its devices.
        problem: what ended the thread early since `begin`, or "".
    """

    def __init__(
        self,
        trainers: Trainers,
        ranks: Mapping[str, Sequence[int]],
        in_flight: Callable[[], Mapping[str, int]],
        timeout: float,
    ) -> None:
        self.trainers, self.ranks, self.timeout = trainers, ranks, timeout
        self.seconds = self.stop_seconds = 0.0
        self.slices = self.interrupted = 0
        self.problem = ""
        self._in_flight = in_flight
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._calm: dict[str, int] = {}  # polls without a request, of servers that had one
        self._since: float | None = None  # begin of the present slice
        self._drained = 0  # ranks that had drained when it began
        self._done = False  # a slice ended by itself

    def begin(self, seconds: float, steps: int | None = None) -> None:
        """Watch the replicas; train for at most ``seconds`` in all, until a slice has made ``steps`` or failed."""
        self.end()
        self.seconds = self.stop_seconds = 0.0
        self.slices = self.interrupted = 0
        self.problem, self._done = "", False
        self._calm.clear()
        self._ending.clear()
        self._thread = threading.Thread(
            target=self._watch, args=(seconds, steps), name="flashpatch-tail", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Stop training and watching: every device is its replica's again. Never raises."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ending.set()
            thread.join()

    def _watch(self, seconds: float, steps: int | None) -> None:
        try:
            while not self._ending.wait(POLL_SECONDS):
                self._look(dict(self._in_flight()), seconds, steps)
        except Exception as error:  # rollouts go on without it
            self.problem = f"{type(error).__name__}: {error}"
            logger.warning("drafter training in the tail ended: %s", self.problem)
        finally:
            try:
                self._stop()
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"
                logger.warning("drafter trainers did not stop: %s", self.problem)

    def _look(self, counts: Mapping[str, int], seconds: float, steps: int | None) -> None:
        for name in self.ranks:
            if counts.get(name, 0):
                self._calm[name] = 0
            elif name in self._calm:
                self._calm[name] += 1
        drained = [
            rank for name, calm in self._calm.items() if calm >= CALM_POLLS for rank in self.ranks[name]
        ]
        training = self.trainers.training
        if training:
            if not set(training) <= set(drained):
                self.interrupted += 1
                self._stop()
            elif not self.trainers.is_training():
                self._done = True
                self._stop()
            elif len(drained) >= 2 * self._drained:
                self._stop()  # the next look begins a slice with all that have drained since
            return
        left = seconds - self.seconds
        others_work = any(counts.get(name, 0) for name in self.ranks)
        if self._done or not drained or not others_work or left <= 0:
            return
        self._drained = len(drained)
        self._since = time.monotonic()  # before the call: if it fails, some ranks may train
        if self.trainers.train(left, sorted(drained), steps):
            self.slices += 1
        else:
            self._since = None

    def _stop(self) -> None:
        began, self._since = self._since, None
        if began is not None:
            told = time.monotonic()
            self.trainers.stop(self.timeout)
            self.stop_seconds = max(self.stop_seconds, time.monotonic() - told)
            self.seconds += time.monotonic() - began
