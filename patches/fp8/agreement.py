"""Ranks agree on the outcome before they go on together.

Post-processing may contain collectives, so either every rank enters it or none. A rank that has failed must be
heard by ranks that wait for it, and must itself never wait: agreement therefore goes through the process
group's key-value store, with polling and a time-out, not through a collective.
"""

from __future__ import annotations

import time

import torch.distributed as dist

TIMEOUT = 120.0  # seconds to wait for the slowest rank
_POLL = 0.002


class Voice:
    """This rank's part in agreements among ``ranks`` tensor-parallel ranks; one per model."""

    _models = 0

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._name = f"flashpatch/{Voice._models}"
        self._round = 0
        self._heard = 0  # failures announced by each rank up to the last verdict
        Voice._models += 1

    def agree(self, error: str | None) -> str | None:
        """Block until every rank has come to this point; the first error by rank order, or None.

        A rank that announced a failure instead of coming ends the wait for all.
        """
        group, rank = self._group()
        store = dist.distributed_c10d._get_default_store()
        self._round += 1
        key = f"{self._name}/{group}/{self._round}"
        store.set(f"{key}/{rank}", error or "ok")
        others = [r for r in range(self._ranks) if r != rank]
        deadline = time.monotonic() + TIMEOUT
        while not all(store.check([f"{key}/{r}"]) for r in others):
            if time.monotonic() > deadline:
                late = [r for r in others if not store.check([f"{key}/{r}"])]
                return f"ranks {late} did not come to an agreement within {TIMEOUT:.0f} s"
            time.sleep(_POLL)
        for r in range(self._ranks):
            verdict = store.get(f"{key}/{r}").decode()
            if verdict != "ok":
                return f"rank {r}: {verdict}"
        return None

    def announce(self, error: str) -> None:
        """Give this rank's error as its answer to the next agreement, without waiting for the others."""
        group, rank = self._group()
        self._round += 1
        dist.distributed_c10d._get_default_store().set(f"{self._name}/{group}/{self._round}/{rank}", error)

    @staticmethod
    def _group() -> tuple[str, int]:
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        return "-".join(map(str, group.ranks)), group.rank_in_group
