"""Send prompts to verl's agent loop workers, those of a worker that died to the others, and start another one."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches.grpo.streaming.groups import PARTITION
from flashpatch.patches.grpo.streaming.mode import BASE, ID

logger = logging.getLogger("flashpatch.grpo")

PING = 1.0
"""Seconds between two questions to a worker whether it lives."""


class Dispatcher:
    """Stand in for verl's agent loop manager towards its trainer.

    Where verl's manager gives a single prompt to its first worker always, this one goes round.

    Args:
        manager: verl's ``AgentLoopManagerTQ``.
        replace: workers that are started in place of dead ones before the next group ends.
    """

    def __init__(self, manager: Any, replace: int = 0) -> None:
        self.manager = manager
        self.workers = list(manager.agent_loop_workers)
        self._replace = self._left = replace
        self._starting: list[Any] = []
        self._next = 0
        self._sent: dict[str, Any] = {}
        self._pings: dict[Any, Any] = {}
        self._asked = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def generate_sequences(self, prompts: Any) -> None:
        """Dispatch prompts without waiting for their responses.

        Args:
            prompts: verl's TensorDict of prompts; ``uid`` names each.

        Raises:
            PatchError: no worker is left.
        """
        import ray

        calls = []
        for chunk in prompts.chunk(min(len(self.workers), len(prompts))):
            worker = self.workers[self._next % len(self.workers)]
            self._next += 1
            if "validate" not in prompts:
                self._sent.update(dict.fromkeys(map(str, chunk["uid"]), worker))
            calls.append((worker, worker.generate_sequences.remote(chunk)))
        for worker, call in calls:
            try:
                ray.get(call)
            except ray.exceptions.RayActorError:
                self._remove(worker)  # `recover` dispatches what it was sent again

    def recover(self, open_groups: Iterable[str]) -> int:
        """Dispatch the open groups of dead workers again; return their number.

        Args:
            open_groups: uids of the groups that have not ended.

        Raises:
            PatchError: no worker is left.
        """
        self._look()
        lost = [uid for uid in open_groups if self._sent.get(uid, self) not in (self, *self.workers)]
        if lost:
            logger.warning("%d prompts of a dead agent loop worker are dispatched again", len(lost))
            ledger.note(redispatched=ledger.notes().get("redispatched", 0) + len(lost))
            self.generate_sequences(_again(lost))
        return len(lost)

    def forget(self, uids: Iterable[str]) -> None:
        """Forget who got groups that have been taken: they have ended."""
        self._left = self._replace
        for uid in uids:
            self._sent.pop(uid, None)

    def _look(self) -> None:
        """Ask each worker whether it lives, without waiting for an answer."""
        import ray

        for worker, ping in list(self._pings.items()):
            if ray.wait([ping], timeout=0)[0]:
                del self._pings[worker]
                try:
                    ray.get(ping)
                except ray.exceptions.RayActorError:
                    self._remove(worker)
                else:
                    self._join(worker)
        if time.monotonic() - self._asked > PING:
            self._asked = time.monotonic()
            for worker in (*self.workers, *self._starting):
                self._pings.setdefault(worker, worker.__ray_ready__.remote())

    def _join(self, worker: Any) -> None:
        """Use a worker that has started."""
        if worker in self._starting:
            self._starting.remove(worker)
            self._use([*self.workers, worker])

    def _use(self, workers: list[Any]) -> None:
        self.workers = self.manager.agent_loop_workers = workers

    def _remove(self, worker: Any) -> None:
        self._use([one for one in self.workers if one != worker])
        self._starting = [one for one in self._starting if one != worker]
        self._pings.pop(worker, None)
        if self._left:
            self._left -= 1
            self._starting.append(_another(self.manager))
            ledger.note(replaced_workers=ledger.notes().get("replaced_workers", 0) + 1)
        if not self.workers and self._starting:
            self._wait(self._starting[0])
        if not self.workers:
            raise PatchError(
                "lost its last agent loop worker.",
                patch=ID,
                target=f"{BASE}:PPOTrainer.fit",
                advice="Look at the workers' logs; more of them: actor_rollout_ref.rollout.agent.num_workers.",
            )

    def _wait(self, worker: Any) -> None:
        """Wait until a worker has started, or has died in turn."""
        import ray

        try:
            ray.get(worker.__ray_ready__.remote())
        except ray.exceptions.RayActorError:
            self._remove(worker)
        else:
            self._join(worker)


def _another(manager: Any) -> Any:
    """Start another worker as verl's manager starts its own."""
    one = copy.copy(manager)
    one.rollout_config = SimpleNamespace(agent=SimpleNamespace(num_workers=1))
    asyncio.run(one._init_agent_loop_workers())
    [worker] = one.agent_loop_workers
    return worker


def _again(uids: list[str]) -> Any:
    """Return the prompts of groups from the queue, where nothing of an earlier attempt is left then."""
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu

    known = tq.kv_list(PARTITION).get(PARTITION, {})
    wanted = set(uids)
    partial = [key for key, tag in known.items() if not tag.get("is_prompt") and key.split("_")[0] in wanted]
    if partial:
        tq.kv_clear(keys=partial, partition_id=PARTITION)
    prompts = tq.kv_batch_get(keys=uids, partition_id=PARTITION)
    steps = [known[uid]["global_steps"] for uid in uids]
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for step in steps]
    tq.kv_batch_put(keys=uids, partition_id=PARTITION, tags=tags)
    tu.assign_non_tensor_data(prompts, "global_steps", min(steps))
    return prompts
