"""Name the keys by which ranks agree in the process group's store, and delete those that are out of use."""

from __future__ import annotations

import json

import torch.distributed as dist


class AgreementKeys:
    """The keys of one model; each rank deletes what it wrote two updates ago.

    Args:
        base: prefix of all keys, the same on all ranks.
        rank: this process's global rank.
    """

    def __init__(self, base: str, rank: int) -> None:
        self._base = base
        self._rank = rank
        self._votes = 0
        self._written: dict[
            int, dict[str, None]
        ] = {}  # update -> keys that this rank may have written for it

    def newest(self, store: dist.Store) -> int:
        """Return the number of the update opened last, 0 before the first."""
        return int(store.compare_set(f"{self._base}/newest", "", "0"))

    def open(self, store: dist.Store, after: int) -> None:
        """Open update ``after + 1``, unless another rank has done so."""
        store.compare_set(f"{self._base}/newest", str(after), str(after + 1))

    def answer(self, update: int, group: int, round_: int, rank: int) -> str:
        """Name the answer of a rank in a round; ``group``: the first rank of those that agree."""
        key = f"{self._base}/{update}/{group}/{round_}/{rank}"
        if rank == self._rank:
            self._note(update, key)
        return key

    def verdict(self, update: int, group: int, round_: int) -> str:
        """Name what the ranks of a group decided in a round."""
        key = f"{self._base}/{update}/{group}/{round_}/verdict"
        if group == self._rank:
            self._note(update, key)
        return key

    def outcome(self, update: int) -> str:
        """Name how an update ended: its error, null if it was committed, and the call; absent while it is open."""
        return f"{self._base}/{update}/outcome"

    def failed_call(self, call: int, rank: int) -> str:
        """Name why a call from the engine core failed on a rank."""
        return f"{self._base}/call-{call}/{rank}"

    def end(self, store: dist.Store, update: int, error: str | None, call: int | None) -> None:
        """Note how an update ended, and in which call from the engine core; the first to do so decides."""
        self._note(update, self.outcome(update))
        store.compare_set(self.outcome(update), "", json.dumps([error, call]))

    def read_outcome(self, store: dist.Store, update: int) -> tuple[str | None, int | None] | None:
        """Return (error, call) of an update that has ended, None while it is open."""
        text = self.read(store, self.outcome(update))
        if text is None:
            return None
        error, call = json.loads(text)
        return error, call

    def fail(self, store: dist.Store, call: int, error: str) -> None:
        """Note that a call failed on this rank."""
        key = self.failed_call(call, self._rank)
        self._note(max(self._written, default=0), key)
        store.set(key, error)

    def read(self, store: dist.Store, key: str) -> str | None:
        """Return a key's value, None if it does not exist."""
        return store.get(key).decode() if store.check([key]) else None

    def delete_old(self, store: dist.Store, update: int) -> None:
        """Delete the keys of updates before the one before ``update``: no rank can be waiting for them."""
        for old in [number for number in self._written if number < update - 1]:
            for key in self._written.pop(old):
                store.delete_key(key)

    def next_vote(self) -> int:
        """Count the votes of this rank; return the number of the next."""
        self._votes += 1
        return self._votes

    def vote(self, number: int, rank: int) -> str:
        """Name a rank's answer to a vote."""
        return f"{self._base}/vote-{number}/{rank}"

    def delete_vote(self, store: dist.Store, number: int) -> None:
        """Delete this rank's answer to a vote."""
        store.delete_key(self.vote(number, self._rank))

    def _note(self, update: int, key: str) -> None:
        self._written.setdefault(update, {})[key] = None
