"""Pack arriving samples into rounds of one batch per rank, under a budget of tokens.

The next sample goes to the fullest rank that has room for it (best fit), so that ranks with much room are
kept for long samples; when no rank has room, the round is complete. Before a round leaves, its samples are
divided anew, since by then all of them are known. async-grpo's ``add_sample_to_batches`` takes the least-full
rank: then all ranks are half full when a long sample comes, and at hundreds of ranks one comes soon. A sample
over the budget is not lost: it gets a batch of its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flashpatch.patches.grpo.errors import refuse
from flashpatch.patches.grpo.streaming.partition import balance

_ENOUGH = 0.0005
"""A division whose fullest batch is this share above the least possible is not improved further."""


@dataclass(frozen=True)
class Batch:
    """Hold one rank's samples of one round.

    Attributes:
        round: number of the round, from 0; every rank gets exactly one batch of each.
        rank: whose it is.
        samples: never empty.
        tokens: sum of the samples' tokens.
        filler: the samples are another rank's and must count nothing: this rank only takes part in the
            forward that FSDP's collectives wait for. Happens in a last round with fewer samples than ranks.
    """

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

    Raises:
        PatchError: an invalid argument.
    """

    def __init__(self, ranks: int, budget: int) -> None:
        if ranks < 1 or budget < 1:
            refuse("packing", "ranks, budget", f"are {ranks} and {budget}.", "Give positive numbers.")
        self.ranks, self.budget = ranks, budget
        self.round = 0
        self._open()

    @property
    def waiting(self) -> int:
        """Count the samples in the open round."""
        return self._waiting

    def add(self, sample: Any, tokens: int) -> Iterator[Round]:
        """Add one sample; return the round that it completed, if any. Costs a search among the ranks, a
        round's end aside.

        The sample is taken when this returns, whether or not the iterator is used.

        Raises:
            PatchError: ``tokens`` is not positive; the sample was not taken then, and everything else is as before.
        """
        if tokens < 1:
            refuse("packing", "tokens", f"is {tokens} for {sample!r:.80}.", "Count prompt and response.")
        done = []
        at = self._room(tokens)
        if at is None:
            done.append(self._close())
            at = 0
        gap, rank = divmod(self._gaps.pop(at), self.ranks)
        insort(self._gaps, (gap - tokens) * self.ranks + rank)
        self._rows[rank].append((tokens, sample))
        self._waiting += 1
        return iter(done)

    def flush(self) -> Round | None:
        """Return the open round as it is, or None when it is empty. Ranks without a sample get a filler."""
        return self._close() if self._waiting else None

    def _open(self) -> None:
        self._waiting = 0
        self._rows: list[list[tuple[int, Any]]] = [[] for _ in range(self.ranks)]
        # Tokens of room times ranks, plus the rank, ascending: plain numbers are found and moved fastest.
        self._gaps = [self.budget * self.ranks + rank for rank in range(self.ranks)]

    def _room(self, tokens: int) -> int | None:
        """Return the place in ``_gaps`` of the rank that takes a sample; one over the budget needs an empty
        rank."""
        need = min(tokens, self.budget) * self.ranks
        at = bisect_left(self._gaps, need)
        return at if at < self.ranks else None

    def _close(self) -> Round:
        rows = self._balanced()
        shortest = min((row for row in rows if row), key=lambda row: sum(tokens for tokens, _ in row))
        batches = tuple(self._batch(rank, row or shortest[:1], not row) for rank, row in enumerate(rows))
        self.round += 1
        self._open()
        return batches

    def _batch(self, rank: int, row: list[tuple[int, Any]], filler: bool) -> Batch:
        samples = tuple(sample for _, sample in row)
        return Batch(self.round, rank, samples, sum(tokens for tokens, _ in row), filler)

    def _balanced(self) -> list[list[tuple[int, Any]]]:
        """Divide the round's samples anew; those over the budget stay alone."""
        # each empty row gets a sample of a row that has several
        several = [row for row in self._rows if len(row) > 1]
        for row in self._rows:
            if not row and several:
                row.append(several[-1].pop())
                if len(several[-1]) == 1:
                    several.pop()
        alone = [row for row in self._rows if row and row[0][0] > self.budget]
        shared = [row for row in self._rows if row and row[0][0] <= self.budget]
        if not shared:
            return self._rows
        items = [item for row in shared for item in row]
        number, start = 0, []
        for row in shared:
            start.append(list(range(number, number + len(row))))
            number += len(row)
        sizes = [tokens for tokens, _ in items]
        parts = balance(sizes, start, _ENOUGH)
        rows = alone + [[items[at] for at in sorted(part)] for part in parts]
        return rows + [[] for _ in range(self.ranks - len(rows))]
