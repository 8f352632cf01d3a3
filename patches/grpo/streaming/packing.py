"""Pack arriving samples into rounds of one batch per rank, under a budget of tokens.

The next sample goes to the fullest rank that has room for it (best fit), so that ranks with much room are
kept for long samples; when no rank has room, the round is complete. Before a round leaves, its samples are
divided anew, since by then all of them are known. async-grpo's ``add_sample_to_batches`` takes the least-full
rank: then all ranks are half full when a long sample comes, and at hundreds of ranks one comes soon. A sample
over the budget is not lost: it gets a batch of its own."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.streaming import ID


@dataclass(frozen=True)
class Batch:
    """Hold one rank's samples of one round.

    Attributes:
        round: number of the round, from 0; every rank gets exactly one batch of each.
        rank: whose it is.
        samples: never empty.
        tokens: sum of the samples' tokens.
        filler: the samples are another rank's and must count nothing: this rank only takes part in the
            forward that FSDP's collectives wait for. Happens in a last round with fewer samples than ranks."""

    round: int
    rank: int
    samples: tuple[Any, ...]
    tokens: int
    filler: bool = False


Round = tuple[Batch, ...]


class Packer:
    """Pack samples into rounds.

    Args:
        ranks: number of batches in a round.
        budget: largest number of tokens in a batch.

    Attributes:
        waiting: samples in the open round."""

    def __init__(self, ranks: int, budget: int) -> None:
        self.ranks, self.budget = ranks, budget
        self.round = 0
        self._open()

    def add(self, sample: Any, tokens: int) -> list[Round]:
        """Add one sample; return the round that it completed, if any. Costs a search among the ranks, a round's end aside.

        Raises PatchError if ``tokens`` is not positive; the sample was not taken then, and everything else is as before."""
        if tokens < 1:
            raise PatchError(
                f"sample {sample!r:.80} has {tokens} tokens.", patch=ID, advice="Count prompt and response."
            )
        done = []
        # The place in `_gaps` of the rank that takes the sample; one over the budget needs an empty rank.
        at = bisect_left(self._gaps, min(tokens, self.budget) * self.ranks)
        if at == self.ranks:
            done.append(self._close())
            at = 0
        gap, rank = divmod(self._gaps.pop(at), self.ranks)
        insort(self._gaps, (gap - tokens) * self.ranks + rank)
        self._rows[rank].append((tokens, sample))
        self.waiting += 1
        return done

    def flush(self) -> Round | None:
        """Return the open round as it is, or None when it is empty. Ranks without a sample get a filler."""
        return self._close() if self.waiting else None

    def _open(self) -> None:
        self.waiting = 0
        self._rows: list[list[tuple[int, Any]]] = [[] for _ in range(self.ranks)]
        # Tokens of room times ranks, plus the rank, ascending: plain numbers are found and moved fastest.
        self._gaps = [self.budget * self.ranks + rank for rank in range(self.ranks)]

    def _close(self) -> Round:
        rows = self._balanced()
        shortest = min((row for row in rows if row), key=lambda row: sum(tokens for tokens, _ in row))
        full = [tuple(zip(*(row or shortest[:1]))) for row in rows]
        batches = tuple(
            Batch(self.round, rank, of, sum(n), not rows[rank]) for rank, (n, of) in enumerate(full)
        )
        self.round += 1
        self._open()
        return batches

    def _balanced(self) -> list[list[tuple[int, Any]]]:
        """Divide the round's samples anew: the longest first, each to the emptiest rank; those over the budget stay alone."""
        rows = [row for row in self._rows if row and row[0][0] > self.budget]
        shared = [item for row in self._rows if row and row[0][0] <= self.budget for item in row]
        loads = [(0, rank) for rank in range(len(rows), self.ranks)]
        rows += [[] for _ in loads]
        for item in sorted(shared, key=lambda item: item[0], reverse=True):
            load, rank = loads[0]
            if load + item[0] > self.budget:
                return self._rows  # this division has no place for it
            rows[rank].append(item)
            heapreplace(loads, (load + item[0], rank))
        return rows
