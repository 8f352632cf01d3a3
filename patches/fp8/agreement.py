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
        self._model = Voice._models
        self._update = self._round = 0
        Voice._models += 1

    def begin(self) -> None:
        """A new update opens: its agreements are counted afresh, on every rank alike."""
        self._update += 1
        self._round = 0

    def agree(self, error: str | None) -> str | None:
        """Block until every rank has come to this point; the first error by rank order, or None.

        A rank that announced a failure instead of coming ends the wait for all.
        """
        store, answers = self._answer(error or "ok")
        deadline = time.monotonic() + TIMEOUT
        while late := [rank for rank, key in enumerate(answers) if not store.check([key])]:
            if time.monotonic() > deadline:
                return f"ranks {late} did not come to an agreement within {TIMEOUT:.0f} s"
            time.sleep(_POLL)
        verdicts = [store.get(key).decode() for key in answers]
        return next((f"rank {r}: {verdict}" for r, verdict in enumerate(verdicts) if verdict != "ok"), None)

    def announce(self, error: str) -> None:
        """Give this rank's error as its answer to the next agreement, without waiting for the others."""
        self._answer(error)

    def _answer(self, text: str) -> tuple[dist.Store, list[str]]:
        """Write this rank's answer to the next round; the store, and where each rank's answer will stand."""
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        store = dist.distributed_c10d._get_default_store()
        self._round += 1
        name = "-".join(map(str, group.ranks))
        prefix = f"flashpatch/{name}/{self._model}/{self._update}/{self._round}"
        store.set(f"{prefix}/{group.rank_in_group}", text)
        return store, [f"{prefix}/{rank}" for rank in range(self._ranks)]
