"""Keep a job going on the rollout servers that are left when others die, and start those again."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches._shared.tally import count
from flashpatch.patches.grpo.routing import resubmit
from flashpatch.patches.grpo.streaming import ID
from flashpatch.patches.grpo.streaming.dispatch import DEAD, PING, REPLACED, state_of

logger = logging.getLogger("flashpatch.grpo")

ANSWER = 30.0
"""Seconds that a server has at least to stop its requests before an update."""
SLOWER = 10.0
"""A server that takes this many times as long as any has taken so far is lost."""
DEVICES = 60.0
"""Seconds within which Ray must have the devices of a lost server back."""

_NONE = "none was started: one needs more devices than rollout.nnodes times n_gpus_per_node"


class Replicas:
    """Send weights to the servers that live, and start others in place of the dead.

    verl's own update ends the job when a server is dead, though its requests went to the others. A server that was
    started again gets its first requests after the next update, which waits for it if no other is left. Within a step it
    gets no weights: verl's workers may begin such a call at another place among the rounds on each rank.

    Args:
        manager: verl's ``LLMServerManager``.
        sync: verl's ``CheckpointEngineManager`` of its replicas.
        replace: servers that are started in place of dead ones before an update reaches all."""

    def __init__(self, manager: Any, sync: Any, replace: int = REPLACED) -> None:
        self.manager, self.sync = manager, sync
        self._replace = self._left = replace
        self._starting: list[tuple[str, Future[Any]]] = []
        self._lost = _NONE  # why the servers were lost that the last look found dead
        self._slowest: float | None = None
        self._asked = time.monotonic()

    @property
    def stop_seconds(self) -> float:
        """Seconds after which a server that has not stopped its requests is lost."""
        return max(ANSWER, SLOWER * (ANSWER if self._slowest is None else self._slowest))

    def answered(self, seconds: float) -> None:
        """Take in within which time all servers have stopped their requests."""
        self._slowest = max(self._slowest or 0.0, seconds)

    def update_weights(self, step: int) -> dict[str, Any]:
        """Send the weights of step ``step``; a replica that is dead, or dies meanwhile, is removed.

        Raises:
            PatchError: no replica is left, and none could be started.
            Exception: the update failed with all replicas alive."""
        joined, lost = self._join(), self.prune()
        while True:
            joined += self._await()
            try:
                found = dict(self.sync.update_weights(step) or {})
                break
            except Exception as error:
                lost = self.prune()
                if not lost:
                    raise
                logger.warning(
                    "the update of step %d failed (%s); repeating it without the lost", step, error
                )
        self._serve(one for one in joined if one in self.sync.replicas)
        if not lost and not self._starting:
            self._left = self._replace
        return found

    def look(self) -> None:
        """Ask now and then whether any server lives: without one all groups fail, and no update ever comes to notice
        it. Raises PatchError if none does."""
        if time.monotonic() - self._asked > PING:
            self._asked = time.monotonic()
            actors = ((*replica.servers, *replica.workers) for replica in self.sync.replicas)
            if all(any(state_of(one.__ray_ready__.remote(), 0.1) is DEAD for one in of) for of in actors):
                self.prune()
                self._refuse_none()

    def _await(self) -> list[Any]:
        """Wait for the replicas that are being started while there is no other, and return those that have joined."""
        joined: list[Any] = []
        while not self.sync.replicas and self._starting:
            logger.warning("no rollout server is left: waiting for those that are being started")
            wait([start for _, start in self._starting], return_when=FIRST_COMPLETED)
            joined += self._join()
        self._refuse_none()
        return joined

    def _refuse_none(self) -> None:
        if self.sync.replicas:
            return
        starting = "; those started in their place have no weights before the step ends" * bool(
            self._starting
        )
        raise PatchError(
            f"has no rollout server: {self._lost}{starting}.",
            patch=ID,
            target="verl.checkpoint_engine.base:CheckpointEngineManager.update_weights",
            advice="Look at the servers' logs; the last checkpoint resumes the job.",
        )

    def _join(self) -> list[Any]:
        """Let the update reach the replicas that have started meanwhile, and return them."""
        joined, waiting = [], []
        for name, start in self._starting:
            if not start.done():
                waiting.append((name, start))
            elif error := start.exception():
                logger.warning("rollout server %s could not be started again: %r", name, error)
            else:
                joined.append(start.result())
        self._starting = waiting
        self.sync.add_replicas(joined)
        return joined

    def _serve(self, replicas: Iterable[Any]) -> None:
        import ray

        servers = {one._server_address: one._server_handle for one in replicas}
        if servers:
            ray.get(self.manager.global_load_balancer.add_servers.remote(servers))
            logger.warning("rollout servers started again: %s", ", ".join(servers))
            count("replaced_servers", len(servers))

    def prune(self) -> list[str]:
        """Remove the replicas that do not answer from verl's balancer and update; return their addresses."""
        import ray

        replicas = list(self.sync.replicas)
        began = time.monotonic()
        problems = asyncio.run(_stop_all(replicas, self.stop_seconds))
        if not any(problems):
            self.answered(time.monotonic() - began)
        dead = [one for one, problem in zip(replicas, problems, strict=True) if problem is not None]
        names = [one._server_address for one in dead]
        if dead:
            self.sync.remove_replicas(dead)
            ray.get(self.manager.global_load_balancer.remove_servers.remote(names))
            for name, problem in zip(names, filter(None, problems), strict=True):
                logger.warning("rollout server %s is lost (%s)", name, problem)
            for one in dead:
                _kill(one)  # what is removed must not come back with old weights
            count("lost_servers", len(dead))
            self._lost = "; ".join(filter(None, problems))
            for one, name in zip(dead[: self._left], names):
                self._left -= 1
                self._starting.append((name, _start_again(self.manager, one)))
        return names


def _start_again(manager: Any, dead: Any) -> Future[Any]:
    """Start another replica in place of one that is lost, in a thread that no job waits for at its end."""
    started: Future[Any] = Future()

    def start() -> None:
        try:
            started.set_result(_another(manager, dead))
        except Exception as error:
            started.set_exception(error)

    threading.Thread(target=start, name="flashpatch-replica", daemon=True).start()
    return started


def _another(manager: Any, dead: Any) -> Any:
    """Start a replica with the rank and the devices of one that is lost, as verl starts its own; return it."""
    _end(dead)
    replica = manager.rollout_replica_class(
        replica_rank=dead.replica_rank,
        config=manager.rollout_config,
        model_config=manager.model_config,
        gpus_per_node=manager.rollout_config.n_gpus_per_node,
    )
    replica.flashpatch_sync_due = True  # the update in which it joins
    end = time.monotonic() + DEVICES
    while True:
        try:
            asyncio.run(replica.init_standalone())
            return replica
        except ValueError:  # verl's, before it starts anything: fewer devices are free than the replica needs
            if time.monotonic() > end:
                raise
        except Exception:
            _end(replica)
            raise
        time.sleep(1.0)


def _end(replica: Any) -> None:
    """End the processes of a replica, and give its devices back; afterwards their names are free."""
    import ray

    _kill(replica)
    for actor in (*replica.servers, *replica.workers):
        while state_of(actor.__ray_ready__.remote(), None) is not DEAD:
            time.sleep(1.0)  # it is not known to be dead yet
    for group in getattr(replica.resource_pool, "pgs", None) or ():
        ray.util.remove_placement_group(group)


def _kill(replica: Any) -> None:
    import ray

    for actor in (*replica.servers, *replica.workers):
        ray.kill(actor)


async def _stop_all(replicas: list[Any], stop_seconds: float) -> list[str | None]:
    """Stop the requests of each replica, as an update does first; return why it is lost, or None for one that lives.

    One that Ray cannot reach is asked again for ``stop_seconds`` seconds. Raises whatever else a server answers."""
    from ray.exceptions import ActorUnavailableError

    async def ask(replica: Any) -> None:
        while True:
            try:
                await replica.abort_all_requests()
                await asyncio.gather(*(worker.__ray_ready__.remote() for worker in replica.workers))
                return
            except ActorUnavailableError:
                await asyncio.sleep(1.0)

    async def stop(replica: Any) -> str | None:
        try:
            await asyncio.wait_for(ask(replica), stop_seconds)
        except Exception as error:
            why = "did not answer in time" if isinstance(error, TimeoutError) else resubmit.lost(error)
            if why is None:
                raise
            return why
        return None

    return await asyncio.gather(*map(stop, replicas))
