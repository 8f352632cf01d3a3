"""Co-train the drafter on verl's own workers, in the tail of each step's rollouts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.verl.cotraining import Job
from flashpatch.patches.eagle.verl.rank_trainers import RankTrainers, Report, on_rank
from flashpatch.patches.eagle.verl.tail import Tail

_CALL_SECONDS = 120.0  # for a call to verl's workers
_POLL_SECONDS = 0.2


class WorkerJob(Job):
    """Train on the ranks of drained replicas while others finish a step's rollouts, and on all ranks in between.

    Args:
        manager: verl's ``CheckpointEngineManager`` (verl/checkpoint_engine/base.py).
        balancer: handle of verl's request balancer; None if verl made none.
        rest: most seconds by which verl's own training waits for a slice on all ranks, if the tail gave less; 0: none.
        others: of `Job`; ``slice`` and ``steps`` bound the tail's training.

    Raises:
        PatchError: verl's workers are not those that its replicas run on.
    """

    def __init__(self, manager: Any, balancer: Any, rest: float, **others: Any) -> None:
        super().__init__(**others)
        self.rest = rest
        self._manager, self._balancer = manager, balancer
        self._ranks = ranks_by_server(manager)
        self._tail: Tail | None = None

    def rollouts_begin(self) -> None:
        """Watch for replicas that drain."""
        if self._tail is not None and self.is_due():
            self._tail.begin(self.slice, self.steps)

    def rollouts_end(self) -> None:
        """Stop training: every device is its replica's again."""
        if self._tail is not None:
            self._tail.end()

    def rollouts_ended(self) -> None:
        """Train on all ranks for what the tail did not give. Never raises."""
        if self.coordinator is None or not self.is_due():
            return
        try:
            left = self.rest - (self._tail.seconds if self._tail else 0.0)
            if left > 0:
                self._train_on_all(left)
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")

    def _train_on_all(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.coordinator.train(seconds, steps=self.steps) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)  # files of the tail's last slice are still written
        while time.monotonic() < end and self.coordinator.is_training():
            time.sleep(_POLL_SECONDS)
        self.coordinator.stop(self.timeout)

    def _make_trainer(self, settings: WorkerSettings) -> RankTrainers:
        trainers = RankTrainers(settings, self._call_ranks, self._manager.actor_wg.world_size)
        if self._balancer is None:
            self._warn("no drafter is trained in the tail: verl made no request balancer")
        elif len(self._ranks) > 1:
            self._tail = Tail(trainers, self._ranks, self._in_flight, self.timeout)
        return trainers

    def _report(self, counts: list[Mapping[str, Any]]) -> None:
        super()._report(counts)
        if self._tail is not None:
            self.metrics["eagle/tail_seconds"] = self._tail.seconds
            self.metrics["eagle/tail_slices"] = float(self._tail.slices)
            self.metrics["eagle/tail_interrupted"] = float(self._tail.interrupted)
            self.metrics["eagle/tail_stop_seconds"] = self._tail.stop_seconds

    def close(self) -> None:
        """Stop watching and end the training processes."""
        self.rollouts_end()
        super().close()

    def _call_ranks(self, ranks: Sequence[int], method: str, arguments: Sequence[tuple]) -> list[Report]:
        import ray

        workers = self._manager.actor_wg.workers
        calls = [
            workers[rank].__ray_call__.remote(on_rank, method, *given)
            for rank, given in zip(ranks, arguments, strict=True)
        ]
        return ray.get(calls, timeout=_CALL_SECONDS)

    def _in_flight(self) -> Mapping[str, int]:
        import ray

        return ray.get(self._balancer.get_status.remote(), timeout=_CALL_SECONDS)["servers"]


def ranks_by_server(manager: Any) -> dict[str, list[int]]:
    """Return the ranks of each replica by the name of its server.

    Raises:
        PatchError: a replica's workers are not among the trainer's, as if rollouts have devices of their own.
    """
    number = {worker._actor_id: rank for rank, worker in enumerate(manager.actor_wg.workers)}
    try:
        return {
            replica._server_address: [number[worker._actor_id] for worker in replica.workers]
            for replica in manager.replicas
        }
    except KeyError:
        raise PatchError(
            "trainer's on=workers trains only if verl's trainer and replicas share devices, and here they do not.",
            patch="eagle",
            target="verl's workers",
            advice="Leave on=workers out of eagle's option trainer.",
        ) from None
