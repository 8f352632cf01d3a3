"""Number the versions of syncs that send differences, in the driver: who holds which, and what is sent again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flashpatch import ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.awaits import as_called, caller_awaits, resolve
from flashpatch.patches.fp8.verl import delta_sync

MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"

logger = logging.getLogger("flashpatch.fp8")


class Versions:
    """Name the versions of this job.

    Attributes:
        last: the version that the last sync made in all processes; None before the first, and after one that failed
            anywhere: then ranks of the trainer may differ in what they take for sent.
        wide: names of weights that some rollout has held in float32; None before the first sync, or if one cannot tell."""

    def __init__(self) -> None:
        self._job, self._numbers = uuid.uuid4().hex[:8], itertools.count(1)
        self._untold = False  # whether a rollout could not tell once
        self.wide: set[str] | None = None
        self.last: str | None = None

    def learn(self, wide: set[str] | None) -> None:
        """Note what rollouts said after a sync; later ones see in bf16 what was cast, so nothing is forgotten."""
        self._untold |= wide is None
        self.wide = None if self._untold else (self.wide or set()) | (wide or set())

    def next(self) -> str:
        """Return the name of a new version; there is no last one until it has been made."""
        self.last = None
        return f"{self._job}-{next(self._numbers)}"


VERSIONS = Versions()


@Patches("fp8", "verl>=0.9").wrap(
    f"{MANAGER}.update_weights",
    relies_on=("self.backend", "self.actor_wg", "self.replicas", "verl.utils.ray_utils:auto_await"),
    evidence="update",
    when="delta_sync=true anywhere=fp8.verl.validate_config_rollout",
    scope="driver",
    why="Whoever sends differences must know what all receivers hold: one may be new, restarted, or have failed.",
    remove_when="verl sends differences through all checkpoint engines, to quantized engines too.",
)
def checkpoint_manager_update_weights_delta(
    original, self, global_steps: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """With delta_sync, ask all rollouts for their version, tell the trainer, and have everything sent in the same call if versions
    differ or a rollout refused what came.

    Like verl's it returns its result or a coroutine, as its caller asks. Raises PatchError if a process does not take
    part, or refused a sync of everything."""
    if self.backend in delta_sync.UNSUPPORTED_BACKENDS or not delta_sync.is_on():
        return as_called(original, self, global_steps, *args, **kwargs)

    async def once(held: str | None) -> Any:
        base = held if held == VERSIONS.last else None
        version = VERSIONS.next()
        await _tell(self, delta_sync.Plan(version, base, VERSIONS.wide))
        result = await resolve(original(self, global_steps, *args, **kwargs))
        VERSIONS.last = version
        return result

    async def synced() -> Any:
        result = await once(await _held(self, global_steps))
        if problems := await _refusals(self):
            _report(global_steps, "a rollout refused a difference", problems)
            result = await once(None)
            if problems := await _refusals(self):
                raise PatchError(
                    f"rollouts refused all weights of step {global_steps}: {'; '.join(problems)}.",
                    patch=Patches.of(checkpoint_manager_update_weights_delta).id,
                    target=MANAGER,
                    advice="Set delta_sync=False, and look for what changes weights on their way.",
                )
        return result

    if caller_awaits():
        return synced()
    with ThreadPoolExecutor(1) as pool:  # the caller's loop, if there is one, runs
        return pool.submit(asyncio.run, synced()).result()


async def _held(manager: Any, step: int | None) -> str | None:
    """Return the version that all rollouts hold; None if there is none."""
    states = await _ask(_rollouts(manager), "held")
    _require("rollout", states)
    versions = {version for _, version in states}
    if len(versions) == 1:
        return versions.pop()
    held = [f"rollout rank {rank} holds {version or 'none'}" for rank, (_, version) in enumerate(states)]
    _report(step, "not all rollouts hold one version", held)
    return None


async def _tell(manager: Any, plan: delta_sync.Plan) -> None:
    _require("trainer", await _ask(manager.actor_wg._workers, "expect", *plan))


async def _refusals(manager: Any) -> list[str]:
    answers = await _ask(_rollouts(manager), "refused")
    return [f"rollout rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]


def _rollouts(manager: Any) -> list[Any]:
    return [worker for replica in manager.replicas for worker in replica.workers]


async def _ask(workers: list[Any], what: str, *given: Any) -> list[Any]:
    """Return what `delta_sync.answer` gives in each worker's process; None where FlashPatch is not installed."""

    def question(actor: Any) -> Any:  # Ray pickles it by value
        try:
            from flashpatch.patches.fp8.verl import delta_sync
        except ImportError:
            return None
        return delta_sync.answer(what, *given)

    return [await call for call in [worker.__ray_call__.remote(question) for worker in workers]]


def _require(side: str, answers: list[Any]) -> None:
    without = [rank for rank, answer in enumerate(answers) if answer is None]
    if without:
        raise PatchError(
            f"{side} ranks {without} do not send or take differences: FlashPatch, or its option delta_sync, is missing there",
            patch=Patches.of(checkpoint_manager_update_weights_delta).id,
            target=MANAGER,
            advice="Give all processes of a job the same FLASHPATCH; flashpatch-verify --live shows them.",
        )


def _report(step: int | None, what: str, problems: list[str]) -> None:
    logger.warning(
        "[flashpatch: %s] step %s: %s, so all weights are sent: %s",
        Patches.of(checkpoint_manager_update_weights_delta).id,
        step,
        what,
        "; ".join(problems),
    )
    ledger.event("error", what=f"delta sync: {what}", step=step, problem="; ".join(problems))
