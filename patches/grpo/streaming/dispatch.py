"""Send prompts to verl's agent loop workers, those of a worker that died to the others, and start another one."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches._shared.tally import count
from flashpatch.patches.grpo.streaming import BASE, ID
from flashpatch.patches.grpo.streaming.groups import PARTITION

logger = logging.getLogger("flashpatch.grpo")

PING = 1.0
"""Seconds between two questions to a worker whether it lives."""
REPLACED = 4
"""Lost workers, or servers, that are started again in a row while nothing gets done."""


class Dispatcher:
    """Stand in for verl's agent loop manager towards its trainer.

    verl's manager gives a single prompt to its first worker always; this one goes round.

    A worker is dead if Ray says that it died. One that Ray cannot reach is slow: it keeps its prompts until it answers or
    dies. It is ended only if it is uncertain whether prompts have reached it.

    Args:
        manager: verl's ``AgentLoopManagerTQ``.
        gone: called with the actor id of a worker that is dead, in hexadecimal.
        replace: workers that are started in place of dead ones before the next group ends."""

    def __init__(
        self, manager: Any, gone: Callable[[str], Any] | None = None, replace: int = REPLACED
    ) -> None:
        self.manager = manager
        self.workers = list(manager.agent_loop_workers)
        self._replace = self._left = replace
        self._gone = gone
        self._starting: list[Any] = []
        self._next = 0
        self._sent: dict[str, Any] = {}
        self._validated: dict[str, Any] = {}
        self._calls: list[tuple[Any, Any]] = []
        self._pings: dict[Any, Any] = {}
        self._asked = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def generate_sequences(self, prompts: Any) -> None:
        """Dispatch the prompts of verl's TensorDict, each named by ``uid``, without waiting for their responses, nor
        for a slow worker."""
        if "validate" in prompts:
            for uid in self._validated:
                self._sent.pop(uid, None)
            # the queue does not hold these
            self._validated = dict.fromkeys(map(str, prompts["uid"]), prompts)
        self._dispatch(prompts)

    def recover(self, open_groups: Iterable[str], partition: str = PARTITION) -> int:
        """Dispatch the open groups of dead workers again; return their number.

        Args:
            open_groups: uids of the groups that have not ended.
            partition: verl's partition of the queue in which they are.

        Raises:
            PatchError: no worker is left.
            ray.exceptions.RayTaskError: a worker refused prompts."""
        self._look()
        lost = [uid for uid in open_groups if self._sent.get(uid, self) not in (self, *self.workers)]
        if lost:
            logger.warning("%d prompts of a dead agent loop worker are dispatched again", len(lost))
            count("redispatched", len(lost))
            known = () if partition == PARTITION else (partition, self._validated[lost[0]])
            self._dispatch(again(lost, *known))
        return len(lost)

    def forget(self, uids: Iterable[str]) -> None:
        """Forget who got groups that have been taken: they have ended."""
        self._left = self._replace
        for uid in uids:
            self._sent.pop(uid, None)

    def end(self) -> None:
        """End the workers, with what was dispatched ahead: the job has taken its last step."""
        import ray

        for worker in (*self.workers, *self._starting):
            ray.kill(worker)
        self._use([])

    def _dispatch(self, prompts: Any) -> None:
        for chunk in prompts.chunk(min(len(self.workers), len(prompts))):
            worker = self.workers[self._next % len(self.workers)]
            self._next += 1
            self._sent.update(dict.fromkeys(map(str, chunk["uid"]), worker))
            self._calls.append((worker, worker.generate_sequences.remote(chunk)))

    def _look(self) -> None:
        """Ask each worker whether it lives, and whether it got its prompts, without waiting for an answer."""
        import ray

        calls, self._calls = self._calls, []
        for worker, call in calls:
            state = state_of(call)
            if state is _UNREACHED:
                logger.warning("an agent loop worker cannot be reached to give it prompts: it is ended")
                ray.kill(worker)  # its pings tell when it is dead
            elif state is None:
                self._calls.append((worker, call))
        for worker, ping in list(self._pings.items()):
            state = state_of(ping)
            if state is None:
                continue
            self._pings.pop(worker, None)
            if state is DEAD:
                self._remove(worker)
            elif state is _DONE:
                self._join(worker)
        if time.monotonic() - self._asked > PING:
            self._asked = time.monotonic()
            for worker in (*self.workers, *self._starting):
                self._pings.setdefault(worker, worker.__ray_ready__.remote())

    def _join(self, worker: Any) -> None:
        if worker in self._starting:
            self._starting.remove(worker)
            self._use([*self.workers, worker])

    def _use(self, workers: list[Any]) -> None:
        self.workers = self.manager.agent_loop_workers = workers

    def _remove(self, worker: Any) -> None:
        self._use([one for one in self.workers if one != worker])
        self._starting = [one for one in self._starting if one != worker]
        self._pings.pop(worker, None)
        if self._gone is not None:
            self._gone(worker._actor_id.hex())
        if self._left:
            self._left -= 1
            self._starting.append(_another(self.manager))
            count("replaced_workers")
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
        while (state := state_of(worker.__ray_ready__.remote(), None)) is _UNREACHED:
            time.sleep(PING)
        if state is DEAD:
            self._remove(worker)
        else:
            self._join(worker)


_DONE, DEAD, _UNREACHED = "done", "dead", "unreached"


def state_of(call: Any, timeout: float | None = 0) -> str | None:
    """Return what became of a call to an actor; None while it runs. Raises ray.exceptions.RayTaskError if the call
    itself failed."""
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError

    if not ray.wait([call], timeout=timeout)[0]:
        return None
    try:
        ray.get(call)
    except ActorUnavailableError:
        return _UNREACHED
    except RayActorError:
        return DEAD
    return _DONE


def _another(manager: Any) -> Any:
    one = copy.copy(manager)
    one.rollout_config = SimpleNamespace(agent=SimpleNamespace(num_workers=1))
    asyncio.run(one._init_agent_loop_workers())
    [worker] = one.agent_loop_workers
    return worker


def again(uids: list[str], partition: str = PARTITION, prompts: Any = None) -> Any:
    """Return the prompts of the groups ``uids``, of which nothing of an earlier attempt is left in verl's partition of
    the queue then; ``prompts`` is a TensorDict that has them, None: the queue has."""
    import transfer_queue as tq
    from verl.utils import tensordict_utils as tu

    known = tq.kv_list(partition).get(partition, {})
    wanted = set(uids)
    partial = [key for key, tag in known.items() if not tag.get("is_prompt") and key.split("_")[0] in wanted]
    if partial:
        tq.kv_clear(keys=partial, partition_id=partition)
    if prompts is None:
        prompts = tq.kv_batch_get(keys=uids, partition_id=partition)
    else:
        rows = [row for row, uid in enumerate(prompts["uid"]) if str(uid) in wanted]
        prompts = tu.index_select_tensor_dict(prompts, rows)
    steps = [known[uid]["global_steps"] for uid in uids]
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for step in steps]
    tq.kv_batch_put(keys=uids, partition_id=partition, tags=tags)
    tu.assign_non_tensor_data(prompts, "global_steps", min(steps))
    return prompts
