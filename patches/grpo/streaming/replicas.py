"""Keep a job going on the rollout servers that are left when others die."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches.grpo.routing import resubmit
from flashpatch.patches.grpo.streaming.mode import ID

logger = logging.getLogger("flashpatch.grpo")

ANSWER = 30.0
"""Seconds within which a server must stop its requests before an update."""


class Replicas:
    """Send weights to the servers that live.

    verl's own update ends the job when a server is dead, though its requests went to the others.

    Args:
        manager: verl's ``LLMServerManager``.
        sync: verl's ``CheckpointEngineManager`` of its replicas.
    """

    def __init__(self, manager: Any, sync: Any) -> None:
        self.manager, self.sync = manager, sync

    def update_weights(self, step: int) -> dict[str, Any]:
        """Send the weights of step ``step``; a replica that is dead, or dies meanwhile, is removed.

        Raises:
            PatchError: no replica is left.
            Exception: the update failed with all replicas alive.
        """
        while True:
            self.prune()
            try:
                return dict(self.sync.update_weights(step) or {})
            except Exception as error:
                if not self.prune():
                    raise
                logger.warning(
                    "the update of step %d failed (%s); repeating it without the lost", step, error
                )

    def prune(self) -> list[str]:
        """Remove the replicas that do not answer from verl's balancer and update; return their addresses.

        Raises:
            PatchError: none is left.
        """
        import ray

        replicas = list(self.sync.replicas)
        problems = asyncio.run(_stop_all(replicas))
        dead = [one for one, problem in zip(replicas, problems, strict=True) if problem is not None]
        names = [one._server_address for one in dead]
        if dead:
            self.sync.remove_replicas(dead)
            ray.get(self.manager.global_load_balancer.remove_servers.remote(names))
            for name, problem in zip(names, filter(None, problems), strict=True):
                logger.warning("rollout server %s is lost (%s)", name, problem)
            ledger.note(lost_servers=ledger.notes().get("lost_servers", 0) + len(dead))
        if not self.sync.replicas:
            raise PatchError(
                f"lost the last rollout server: {'; '.join(map(str, filter(None, problems)))}.",
                patch=ID,
                target="verl.checkpoint_engine.base:CheckpointEngineManager.update_weights",
                advice="Look at the servers' logs; the last checkpoint resumes the job.",
            )
        return names


async def _stop_all(replicas: list[Any]) -> list[str | None]:
    """Stop the requests of each replica, as an update does first; return why it is lost, or None for one that lives.

    Raises:
        Exception: whatever else a server answers.
    """

    async def stop(replica: Any) -> str | None:
        try:
            await asyncio.wait_for(replica.abort_all_requests(), ANSWER)
            await asyncio.wait_for(
                asyncio.gather(*(worker.__ray_ready__.remote() for worker in replica.workers)), ANSWER
            )
        except Exception as error:
            why = resubmit.lost(error)
            if why is None:
                raise
            return why
        return None

    return await asyncio.gather(*map(stop, replicas))
