"""Let ranks agree on the outcome before they go on together.

Post-processing may contain collectives, so either every rank enters it or none. A failing rank must report to the
ranks that wait for it and must itself never wait. Agreement therefore goes through the process group's key-value
store, with polling and a time-out, not through a collective.

Two groups agree. The ranks that share a pipeline stage process layers together (`RankConsensus.agree`); all ranks of
the engine decide together whether an update is committed (`RankConsensus.agree_on_commit`), and count updates
together: the number of the open update is in the store, so that a rank that failed before it began joins the next
one under the same number.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from flashpatch.patches.fp8.refit.agreement_keys import AgreementKeys

TIMEOUT = 120.0  # seconds to wait for the slowest rank
_POLL = 0.002

Verdict = tuple[str | None, list[int], bool]
"""The first error of any rank or None, the layers ready on all ranks, whether all ranks are at their last round."""


class Consensus(Protocol):
    """Agreement among the ranks that update a model together.

    Attributes:
        ranks: how many process layers together.
        update: number of the update that this rank has begun last, the same on all ranks; None if updates are not counted.
        stages: whether the model is spread over pipeline stages, which process layers apart.
    """

    ranks: int
    stages: bool
    update: int | None

    def begin(self) -> None:
        """Begin an update: the one that another rank has opened, or a new one."""

    def agree(self, error: str | None, ready: Sequence[int] = (), last: bool = True) -> Verdict:
        """Block until every rank that processes layers together has called this; see `RankConsensus.agree`."""

    def agree_on_commit(self, error: str | None) -> str | None:
        """Block until every rank that holds a part of the model has called this; return the first error of any."""

    def everyone_ready(self, ready: bool) -> bool:
        """Whether all ranks hold a complete update that has not ended; every rank of the engine asks at once."""

    def failure(self) -> tuple[str, bool] | None:
        """Return the error with which another rank ended our open update, and whether it did so in this call; None while it is open."""

    def announce(self, error: str) -> None:
        """Report a failure to the other ranks without waiting for them."""

    def announce_failed_call(self, call: int, error: str) -> None:
        """Report that a call from the engine core failed on this rank, whether or not it had begun an update."""


class SingleRank:
    """The consensus of a model that one rank holds alone."""

    ranks = 1
    stages = False
    update = None

    def begin(self) -> None:
        return None

    def agree(self, error: str | None, ready: Sequence[int] = (), last: bool = True) -> Verdict:
        return error, list(ready), last

    def agree_on_commit(self, error: str | None) -> str | None:
        return error

    def everyone_ready(self, ready: bool) -> bool:
        return ready

    def failure(self) -> None:
        return None

    def announce(self, error: str) -> None:
        pass

    def announce_failed_call(self, call: int, error: str) -> None:
        pass


class RankConsensus:
    """Agreement among the ranks of one engine; one object per model and rank.

    Args:
        together: global ranks that process layers together (tensor parallel), in order, this one among them.
        everyone: global ranks that hold a part of the model (pipeline stages too); None: the same.
        rank: this process's global rank; None: asks the process group.
        name: of the model, the same on all ranks. Objects of one name are counted, in the order of construction.
        call: returns the number of the call from the engine core that is under way, None if calls are not counted.
    """

    _constructed: Counter[str] = Counter()

    def __init__(
        self,
        together: Sequence[int],
        everyone: Sequence[int] | None = None,
        *,
        rank: int | None = None,
        name: str = "target",
        call: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.ranks = len(together)
        self._together = list(together)
        self._everyone = list(together if everyone is None else everyone)
        self._rank = dist.get_rank() if rank is None else rank
        self.stages = self._everyone != self._together
        self._call = call
        number = RankConsensus._constructed[name]
        RankConsensus._constructed[name] += 1
        self._keys = AgreementKeys(
            f"flashpatch/{self._everyone[0]}-{self._everyone[-1]}/{name}-{number}", self._rank
        )
        self.update = 0
        self._round = 0

    def begin(self) -> None:
        """Open the next update, or join the one that another rank has opened."""
        store = self._store()
        while True:
            newest = self._keys.newest(store)
            if newest > self.update and not self._ended_before(self._keys.read_outcome(store, newest)):
                break
            self._keys.open(store, after=newest)
        self._join(store, newest)

    def agree(self, error: str | None, ready: Sequence[int] = (), last: bool = True) -> Verdict:
        """Block until every rank that processes layers together has come to this point.

        Args:
            error: why this rank cannot go on, or None.
            ready: numbers of the layers this rank could process now.
            last: whether this rank has nothing more to bring in this call.

        Returns:
            The first error by rank order, or None; the layers that all ranks can process; whether it is the
            last agreement of the call for every rank.

        A rank that announced a failure instead of coming ends the wait for all. The first rank to reach a
        verdict, or to give up, decides for all: one that comes later does not go on alone.
        """
        if self.ranks == 1:
            return error, list(ready), last
        return self._agree(self._together, [error, list(ready), last], self._round + 1)

    def agree_on_commit(self, error: str | None) -> str | None:
        """Block until every rank of the engine is ready to commit; return the first error by rank order, or None."""
        verdict, _, _ = self._agree(self._everyone, [error, [], True], 0)
        self._end(verdict)
        return verdict

    def everyone_ready(self, ready: bool) -> bool:
        """Whether every rank of the engine is ready; blocks if the model is spread over pipeline stages.

        Ranks of one stage know already: they process a layer only when it has come on all of them.
        """
        if not self.stages:
            return ready
        store, number = self._store(), self._keys.next_vote()
        store.set(self._keys.vote(number, self._rank), json.dumps(ready))
        votes = [self._keys.vote(number, rank) for rank in self._everyone]
        deadline = time.monotonic() + TIMEOUT
        while not store.check(votes):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)
        ready = all(json.loads(store.get(vote)) for vote in votes)
        self._keys.delete_vote(
            store, number - 1
        )  # everyone has come to this vote, so everyone has read the last
        return ready

    def failure(self) -> tuple[str, bool] | None:
        """Return the error with which another rank ended our open update, and whether it did so in this call; None while it is open."""
        outcome = self._keys.read_outcome(self._store(), self.update) if self.update else None
        if outcome is None or outcome[0] is None:
            return None
        error, call = outcome
        return error, call == self._call()

    def announce(self, error: str) -> None:
        """Report this rank's failure: it ends the open update for every rank."""
        self._end(f"rank {self._position()}: {error}")

    def announce_failed_call(self, call: int, error: str) -> None:
        """Report that a call from the engine core failed on this rank, whether or not it had begun an update."""
        self._keys.fail(self._store(), call, f"rank {self._position()}: {error}")

    def _agree(self, members: list[int], answer: list[Any], round_: int) -> Verdict:
        store = self._store()
        self._round = round_ or self._round
        self._answer(store, members, answer, round_)
        verdict = json.dumps(self._wait(store, members, answer, round_))
        decided = store.compare_set(self._keys.verdict(self.update, members[0], round_), "", verdict)
        error, ready, last = json.loads(decided)
        if error:
            self._end(error)
        return error, ready, last

    def _answer(self, store: dist.Store, members: list[int], answer: list[Any], round_: int) -> None:
        store.set(self._keys.answer(self.update, members[0], round_, self._rank), json.dumps(answer))

    def _wait(self, store: dist.Store, members: list[int], answer: list[Any], round_: int) -> Verdict:
        deadline = time.monotonic() + TIMEOUT
        while True:
            answers = [self._keys.answer(self.update, members[0], round_, rank) for rank in members]
            late = [place for place, key in enumerate(answers) if not store.check([key])]
            if not late:
                break
            reason = self._given_up(store, [members[place] for place in late])
            if reason is None and time.monotonic() > deadline:
                reason = f"ranks {late} did not come to an agreement within {TIMEOUT:.0f} s"
            if reason is not None:
                return reason, [], True
            newest = self._keys.newest(store)
            if newest > self.update:  # the others have given this update up
                if self._round > 1 or (self._round == 1 and round_ == 0):
                    return "another rank has begun another update", [], True
                self._join(store, newest)
                self._round = round_
                self._answer(store, members, answer, round_)
            time.sleep(_POLL)
        errors, ready, last = zip(*(json.loads(store.get(key)) for key in answers))
        error = next((f"rank {place}: {error}" for place, error in enumerate(errors) if error), None)
        return error, sorted(set.intersection(*map(set, ready))), all(last)

    def _given_up(self, store: dist.Store, late: list[int]) -> str | None:
        """Why the late ranks will not come, or None."""
        outcome = self._keys.read_outcome(store, self.update)
        if outcome is not None:
            return outcome[0]
        call = self._call()
        if call is None:
            return None
        failures = (self._keys.read(store, self._keys.failed_call(call, rank)) for rank in late)
        return next((failure for failure in failures if failure is not None), None)

    def _end(self, error: str | None) -> None:
        self._keys.end(self._store(), self.update, error, self._call())

    def _ended_before(self, outcome: tuple[str | None, int | None] | None) -> bool:
        """Whether an update ended that this rank has no part in: one that failed in this call fails here too."""
        if outcome is None:
            return False
        error, call = outcome
        return error is None or call != self._call()

    def _join(self, store: dist.Store, number: int) -> None:
        self._keys.delete_old(store, number)
        self.update = number
        self._round = 0

    def _position(self) -> int:
        return self._everyone.index(self._rank)

    @staticmethod
    def _store() -> dist.Store:
        return dist.distributed_c10d._get_default_store()
