"""Let ranks agree on the outcome before they go on together.

Post-processing may contain collectives, so either every rank enters it or none. A failing rank must report to the
ranks that wait for it and must itself never wait. Agreement therefore goes through the process group's key-value
store, with polling and a time-out, not through a collective.

Two groups agree. The ranks that share a pipeline stage process layers together (`RankConsensus.agree`); all ranks of
the engine decide together whether an update is committed (`RankConsensus.agree_on_commit`), and count updates
together: the number of the open update is in the store, so that a rank that failed before it began joins the next
one under the same number."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

TIMEOUT = 120.0  # seconds to wait for the slowest rank
_POLL = 0.002

Verdict = tuple[str | None, list[int], bool]
"""The first error of any rank or None, the layers ready on all ranks, whether all ranks are at their last round."""


class SingleRank:
    """The consensus of a model that one rank holds alone; see `RankConsensus`."""

    ranks = 1
    stages = False
    update = None

    def begin(self) -> None:
        return None

    def agree(self, error: str | None, ready: Sequence[int] = (), last: bool = True) -> Verdict:
        return error, list(ready), last

    def agree_on_commit(self, error: str | None, empty: bool = False) -> tuple[str | None, bool]:
        return (None if empty else error), empty

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

    Attributes:
        ranks: how many process layers together.
        update: number of the update that this rank has begun last, the same on all ranks.
        stages: whether the model is spread over pipeline stages, which process layers apart."""

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
        self._base = f"flashpatch/{self._everyone[0]}-{self._everyone[-1]}/{name}-{number}"
        # update -> keys that this rank may have written for it
        self._written: dict[int, dict[str, None]] = {}
        self.update = 0
        self._round = self._votes = 0

    def begin(self) -> None:
        """Open the next update, or join the one that another rank has opened."""
        store = self._store()
        while True:
            newest = self._newest(store)
            if newest > self.update and not self._ended_before(self._outcome(store, newest)):
                break
            store.compare_set(f"{self._base}/newest", str(newest), str(newest + 1))
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
        verdict, or to give up, decides for all: one that comes later does not go on alone."""
        if self.ranks == 1:
            return error, list(ready), last
        return self._agree(self._together, [error, list(ready), last], self._round + 1)

    def agree_on_commit(self, error: str | None, empty: bool = False) -> tuple[str | None, bool]:
        """Block until every rank of the engine is ready to commit.

        Args:
            error: why this rank cannot, or None.
            empty: nothing has come to this rank, which is an error only if something has to another.

        Returns:
            The first error by rank order, or None; whether nothing has come to any rank."""
        verdict, _, empty = self._agree(self._everyone, [error, [], empty], 0)
        self._end(verdict)
        return verdict, empty

    def everyone_ready(self, ready: bool) -> bool:
        """Whether every rank of the engine is ready; blocks if the model is spread over pipeline stages.

        Ranks of one stage know already: they process a layer only when it has come on all of them."""
        if not self.stages:
            return ready
        store = self._store()
        self._votes += 1
        mine, last = (f"{self._base}/vote-{number}/{self._rank}" for number in (self._votes, self._votes - 1))
        store.set(mine, json.dumps(ready))
        votes = [f"{self._base}/vote-{self._votes}/{rank}" for rank in self._everyone]
        deadline = time.monotonic() + TIMEOUT
        while not store.check(votes):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)
        ready = all(json.loads(store.get(vote)) for vote in votes)
        store.delete_key(last)  # everyone has come to this vote, so everyone has read the last
        return ready

    def failure(self) -> tuple[str, bool] | None:
        """Return the error with which another rank ended our open update, and whether it did so in this call; None while it is open."""
        outcome = self._outcome(self._store(), self.update) if self.update else None
        if outcome is None or outcome[0] is None:
            return None
        error, call = outcome
        return error, call == self._call()

    def announce(self, error: str) -> None:
        """Report this rank's failure: it ends the open update for every rank."""
        self._end(f"rank {self._position()}: {error}")

    def announce_failed_call(self, call: int, error: str) -> None:
        """Report that a call from the engine core failed on this rank, whether or not it had begun an update."""
        key = self._own(max(self._written, default=0), f"{self._base}/call-{call}/{self._rank}")
        self._store().set(key, f"rank {self._position()}: {error}")

    def _agree(self, members: list[int], answer: list[Any], round_: int) -> Verdict:
        store = self._store()
        self._round = round_ or self._round
        self._answer(store, members, answer, round_)
        verdict = json.dumps(self._wait(store, members, answer, round_))
        key = self._key(members, round_, "verdict")
        if members[0] == self._rank:
            self._own(self.update, key)
        error, ready, last = json.loads(store.compare_set(key, "", verdict))
        if error:
            self._end(error)
        return error, ready, last

    def _answer(self, store: dist.Store, members: list[int], answer: list[Any], round_: int) -> None:
        store.set(self._own(self.update, self._key(members, round_, self._rank)), json.dumps(answer))

    def _wait(self, store: dist.Store, members: list[int], answer: list[Any], round_: int) -> Verdict:
        deadline = time.monotonic() + TIMEOUT
        while True:
            newest = self._newest(store)  # before the answers: who has answered may have gone on since
            answers = [self._key(members, round_, rank) for rank in members]
            late = [place for place, key in enumerate(answers) if not store.check([key])]
            if not late:
                break
            reason = self._given_up(store, [members[place] for place in late])
            if reason is None and time.monotonic() > deadline:
                reason = f"ranks {late} did not come to an agreement within {TIMEOUT:.0f} s"
            if reason is not None:
                return reason, [], True
            if newest > self.update:  # the others have given this update up
                if newest > self.update + 1 or self._round > 1 or (self._round == 1 and round_ == 0):
                    return "another rank has begun another update", [], True
                self._join(store, newest)
                self._round = round_
                self._answer(store, members, answer, round_)
            time.sleep(_POLL)
        errors, ready, last = zip(*(json.loads(store.get(key)) for key in answers))
        error = next((f"rank {place}: {error}" for place, error in enumerate(errors) if error), None)
        if round_ == 0 and all(last):  # nothing has come to anyone, so that nothing is missing
            error = None
        return error, sorted(set.intersection(*map(set, ready))), all(last)

    def _given_up(self, store: dist.Store, late: list[int]) -> str | None:
        """Why the late ranks will not come, or None."""
        outcome = self._outcome(store, self.update)
        if outcome is not None:
            return outcome[0]
        call = self._call()
        if call is None:
            return None
        failures = (self._read(store, f"{self._base}/call-{call}/{rank}") for rank in late)
        return next((failure for failure in failures if failure is not None), None)

    def _end(self, error: str | None) -> None:
        """Note how the update ended, and in which call from the engine core; the first to do so decides."""
        key = self._own(self.update, f"{self._base}/{self.update}/outcome")
        self._store().compare_set(key, "", json.dumps([error, self._call()]))

    def _ended_before(self, outcome: tuple[str | None, int | None] | None) -> bool:
        """Whether an update ended that this rank has no part in: one that failed in this call fails here too."""
        if outcome is None:
            return False
        error, call = outcome
        return error is None or call != self._call()

    def _join(self, store: dist.Store, number: int) -> None:
        """Begin an update; delete the keys of those before the last one, for which no rank can be waiting."""
        for old in [written for written in self._written if written < number - 1]:
            for key in self._written.pop(old):
                store.delete_key(key)
        self.update = number
        self._round = 0

    def _position(self) -> int:
        return self._everyone.index(self._rank)

    def _newest(self, store: dist.Store) -> int:
        return int(store.compare_set(f"{self._base}/newest", "", "0"))

    def _outcome(self, store: dist.Store, update: int) -> tuple[str | None, int | None] | None:
        """Return (error, call) of an update that has ended, None while it is open."""
        text = self._read(store, f"{self._base}/{update}/outcome")
        return None if text is None else tuple(json.loads(text))

    def _key(self, members: list[int], round_: int, what: object) -> str:
        """Name what a rank answered, or the group decided, in a round of the open update."""
        return f"{self._base}/{self.update}/{members[0]}/{round_}/{what}"

    def _own(self, update: int, key: str) -> str:
        """Note that this rank deletes ``key`` when two further updates have begun; return it."""
        self._written.setdefault(update, {})[key] = None
        return key

    @staticmethod
    def _read(store: dist.Store, key: str) -> str | None:
        return store.get(key).decode() if store.check([key]) else None

    @staticmethod
    def _store() -> dist.Store:
        return dist.distributed_c10d._get_default_store()


Consensus = SingleRank | RankConsensus
