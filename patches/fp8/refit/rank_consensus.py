"""Let ranks agree on the outcome before they go on together.

Post-processing may contain collectives, so either every rank enters it or none. A failing rank must report to the
ranks that wait for it and must itself never wait. Agreement therefore goes through the process group's key-value
store, with polling and a time-out, not through a collective.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist

TIMEOUT = 120.0  # seconds to wait for the slowest rank
_POLL = 0.002

Verdict = tuple[str | None, list[int], bool]
"""The first error of any rank or None, the layers ready on all ranks, whether all ranks are at their last round."""


class Consensus(Protocol):
    """Agreement among the ranks that update a model together.

    Attributes:
        ranks: how many there are.
    """

    ranks: int

    def begin(self) -> int | None:
        """Open a new update; return its number, the same on all ranks, or None where nobody counts."""

    def agree(self, error: str | None, ready: Sequence[int] = (), last: bool = True) -> Verdict:
        """Block until every rank has called this; see `RankConsensus.agree`."""

    def announce(self, error: str) -> None:
        """Report a failure to the other ranks without waiting for them."""


class SingleRank:
    """The consensus of a model that one rank holds alone."""

    ranks = 1

    def begin(self) -> None:
        return None

    def agree(self, error: str | None, ready: Sequence[int] = (), last: bool = True) -> Verdict:
        return error, list(ready), last

    def announce(self, error: str) -> None:
        pass


class RankConsensus:
    """Agreement among tensor-parallel ranks; one object per model and rank.

    Args:
        ranks: how many ranks hold the model.
        group: returns the engine's tensor-parallel group: an object with ``ranks`` and ``rank_in_group``.
    """

    _models = 0

    def __init__(self, ranks: int, group: Callable[[], Any]) -> None:
        self.ranks = ranks
        self._group = group
        self._model = RankConsensus._models
        self._update = self._round = 0
        RankConsensus._models += 1

    def begin(self) -> int:
        """Open a new update and count its rounds afresh, on every rank alike; return its number."""
        self._update += 1
        self._round = 0
        return self._update

    def agree(self, error: str | None, ready: Sequence[int] = (), last: bool = True) -> Verdict:
        """Block until every rank has come to this point.

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
        store, prefix, answers = self._answer(json.dumps([error, list(ready), last]))
        verdict = json.dumps(self._wait(store, answers))
        error, ready, last = json.loads(store.compare_set(f"{prefix}/verdict", "", verdict))
        return error, ready, last

    def _wait(self, store: dist.Store, answers: list[str]) -> Verdict:
        deadline = time.monotonic() + TIMEOUT
        while late := [rank for rank, key in enumerate(answers) if not store.check([key])]:
            if time.monotonic() > deadline:
                return f"ranks {late} did not come to an agreement within {TIMEOUT:.0f} s", [], True
            time.sleep(_POLL)
        errors, ready, last = zip(*(json.loads(store.get(key)) for key in answers))
        error = next((f"rank {rank}: {error}" for rank, error in enumerate(errors) if error), None)
        return error, sorted(set.intersection(*map(set, ready))), all(last)

    def announce(self, error: str) -> None:
        """Give this rank's error as its answer to the next round, without waiting for the others."""
        self._answer(json.dumps([error, [], True]))

    def _answer(self, text: str) -> tuple[dist.Store, str, list[str]]:
        """Write this rank's answer to the next round; the store, the round's prefix, the keys of all answers."""
        group = self._group()
        store = dist.distributed_c10d._get_default_store()
        self._round += 1
        name = "-".join(map(str, group.ranks))
        prefix = f"flashpatch/{name}/{self._model}/{self._update}/{self._round}"
        store.set(f"{prefix}/{group.rank_in_group}", text)
        return store, prefix, [f"{prefix}/{rank}" for rank in range(self.ranks)]
