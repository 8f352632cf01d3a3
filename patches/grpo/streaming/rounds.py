"""Pack samples into rounds and send each to the training ranks when it is full, without waiting for them."""

from __future__ import annotations

import time
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.grpo.streaming import ID
from flashpatch.patches.grpo.streaming.packing import Packer, Round

EAGER = 0.5
"""An idle trainer gets a round that is filled to this share of its budget."""


class Rounds:
    """Run the rounds of one step on verl's workers.

    Args:
        actor: verl's worker group of `flashpatch.patches.grpo.streaming.worker.StreamWorker`.
        reference: that of the reference model; None without one.
        budget: tokens per worker; workers that share a rank's samples (Ulysses) have theirs together.
        fields: extra fields of every round.

    Raises:
        PatchError: the reference is split over the ranks in another way than the policy.

    Attributes:
        keys, tags: the samples taken so far, as in verl's ``KVBatchMeta``.
        launched: rounds sent.
        first: seconds from the start to the first round; None before it.
        fillers: shares of rounds that had no sample."""

    def __init__(self, actor: Any, reference: Any, budget: int, fields: dict[str, Any]) -> None:
        self.actor, self.reference, self.fields = actor, reference, fields
        self.ranks = dp_ranks(actor, "actor")
        if reference is not None and dp_ranks(reference, "ref") != self.ranks:
            raise PatchError(
                f"cannot stream rounds: the policy's ranks take the shares {self.ranks}, the reference's "
                f"{dp_ranks(reference, 'ref')}.",
                patch=ID,
                target="actor_rollout_ref.ref",
                advice="Give actor_rollout_ref.ref the actor's ulysses_sequence_parallel_size.",
            )
        count = max(self.ranks) + 1
        budget *= len(self.ranks) // count
        self.packer = Packer(count, budget)
        self.keys: list[str] = []
        self.tags: list[dict[str, Any]] = []
        self.launched = self.fillers = 0
        self.first: float | None = None
        self._least = EAGER * budget * count
        self._waiting = 0
        self._running: list[Any] = []
        self._start = time.perf_counter()

    def add(self, batch: Any) -> None:
        """Pack the samples of a ``KVBatchMeta``, whose advantages are known; send what is full."""
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            self.keys.append(key)
            self.tags.append(tag)
            self._waiting += tag["seq_len"]
            for one in self.packer.add((key, tag), tag["seq_len"]):
                self._waiting = tag["seq_len"]
                self._launch(one)

    def idle(self) -> bool:
        """Whether the workers have done all rounds sent to them. Raises ray.exceptions.RayError if a round failed on a
        rank; the job must end, as the other ranks wait for it."""
        import ray

        if self._running:
            done, self._running = ray.wait(self._running, num_returns=len(self._running), timeout=0)
            ray.get(done)
        return not self._running

    def fill(self) -> None:
        """Give an idle trainer the open round if there is enough in it for every rank."""
        if self.packer.waiting >= self.packer.ranks and self._waiting >= self._least and self.idle():
            self._flush()

    def finish(self) -> dict[str, Any]:
        """Send the last round, let every rank step its optimizer, and return verl's metrics of the update. Raises
        ray.exceptions.RayError if a rank failed."""
        import ray

        self._flush()
        ray.get(self._running)
        return next(found for found in self.actor.stream_finish() if found is not None)

    def _flush(self) -> None:
        last = self.packer.flush()
        self._waiting = 0
        if last is not None:
            self._launch(last)

    def _launch(self, packed: Round) -> None:
        from transfer_queue import KVBatchMeta

        from flashpatch.patches.grpo.streaming.worker import FILLER, REFERENCE

        shares = [
            KVBatchMeta(
                partition_id="train",
                keys=[key for key, _ in batch.samples],
                tags=[tag for _, tag in batch.samples],
                extra_info={**self.fields, FILLER: batch.filler, REFERENCE: self.reference is not None},
            )
            for batch in packed
        ]
        if (
            len(self.ranks) > self.packer.ranks
        ):  # they share rows; Ray may begin calls in another order on each
            import ray

            ray.get(self._running)
        if self.first is None:
            self.first = time.perf_counter() - self._start
        self.launched += 1
        self.fillers += sum(batch.filler for batch in packed)
        self._running += self.actor.stream_accumulate([shares[rank] for rank in self.ranks])


def dp_ranks(group: Any, mesh: str) -> list[int]:
    """Return the data-parallel rank, in ``mesh`` ("actor" or "ref"), of each worker of verl's group; workers of one
    rank (tensor or sequence parallel) get the same."""
    known = group._dispatch_info
    if mesh not in known:
        known[mesh] = group._query_dispatch_info(mesh)
    return known[mesh]
