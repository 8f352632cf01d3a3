"""Co-train the drafter of one verl job: train when rollouts end, and send it to every replica before the next begin.

Nothing here stops a job. Whatever fails, the target's verification keeps every token right; only speed is
lost, and the log, the ledger and the metrics say so."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.patches._shared.awaits import followed
from flashpatch.patches.eagle import verl_sglang, verl_vllm
from flashpatch.patches.eagle.drafter_refit.commands import (
    ACCEPT_LENGTH,
    ACCEPT_RATE,
    FLUSH,
    REQUESTS,
    SAVE_EMBEDDINGS,
    UPDATE,
)
from flashpatch.patches.eagle.options import UNTIL_VERL
from flashpatch.patches.eagle.train.coordinator import Coordinator
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.verl import verl_config

logger = logging.getLogger("flashpatch.eagle")

Call = Callable[[str, tuple], list[Any]]
"""Calls a worker method on every replica; returns a list of its workers' answers per replica."""

_KEPT = 2  # folders of embeddings and head: the trainer's present and next one


class Job:
    """Train a drafter in the pauses of one job's rollouts.

    Args:
        settings: of the training process, without ``queue``, which the replicas report.
        train_seconds: most seconds of training between two rollouts.
        timeout: seconds to wait for the trainer when rollouts are about to go on.
        steps: most optimizer steps between two rollouts; 0: any.
        every: train in every so many steps of the policy.

    Attributes:
        coordinator: of the training process; None until a replica has reported its sample directory.
        version: of the drafter that was sent last, also if not all replicas took it: those that did hold it.
        metrics: of the last pause, ``eagle/...``."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        train_seconds: float,
        timeout: float,
        steps: int = 0,
        every: int = 1,
    ) -> None:
        self.settings, self.train_seconds, self.timeout = dict(settings), train_seconds, timeout
        self.steps, self.every = steps or None, every
        self.coordinator: Coordinator | None = None
        self.version = 0
        self.metrics: dict[str, float] = {}
        self._sent: Path | None = None
        self._embeddings: list[Path] = []  # folders, the newest last
        self._held = 0  # version of the drafter that all replicas took last
        self._last_problem = ""
        self._updates = 0

    def rollouts_ended(self) -> None:
        """Start a slice of training, now that the replicas sleep."""
        if self.coordinator is not None and self._trains():
            self.coordinator.train(self.train_seconds, steps=self.steps)

    def _trains(self) -> bool:
        """Whether the trainer has the next pause, and so needs the policy of now."""
        return self._updates % self.every == 0

    def policy_updated(self, call: Call, step: int | None) -> None:
        """Send the newest drafter to the replicas, which have a new policy and no rollout yet. Never raises."""
        self._updates += 1
        try:
            self._exchange(call, step)
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")

    def _exchange(self, call: Call, step: int | None) -> None:
        counts = [first for answers in call(FLUSH, ()) for first in answers[:1] if first]
        if not self._start_trainer(counts):
            return
        self.coordinator.wait_idle(self.timeout)
        drafter = self.coordinator.drafter
        if drafter is not None and drafter != self._sent:
            self._send_drafter(call, drafter)
        if self._trains():
            self._send_embeddings(call, step)
        self._report(counts)

    def close(self) -> None:
        """End the training process."""
        if self.coordinator is not None:
            self.coordinator.close()

    def _start_trainer(self, counts: Iterable[Mapping[str, Any]]) -> bool:
        """Start the trainer once the replicas report where samples are; return whether it runs."""
        if self.coordinator is not None:
            return True
        queues = sorted({str(one["queue"]) for one in counts if "queue" in one})
        if len(queues) != 1:
            self._warn(f"no drafter is trained: replicas capture to {', '.join(queues) or 'nowhere'}")
            return False
        settings, environment = _with_device(WorkerSettings.of({**self.settings, "queue": queues[0]}))
        self.coordinator = Coordinator(settings, environment=environment)
        return self.coordinator.start()

    def _send_drafter(self, call: Call, drafter: Path) -> None:
        self._sent = drafter  # not again, even if it fails
        self.version += 1
        try:
            call(UPDATE, (str(drafter), self.version))
            self._held = self.version
        except Exception as error:  # the replicas go on with the old one
            self._warn(f"the replicas refused drafter {drafter.name}: {error}")

    def _send_embeddings(self, call: Call, step: int | None) -> None:
        folder = Path(self.settings["folder"])
        target = folder / f"shared-{step or 0:09d}-{self._updates}"  # a new one each time, whatever the step
        try:
            call(SAVE_EMBEDDINGS, (str(target),))
        except Exception as error:
            self._warn(f"the trainer keeps older embeddings and head: {error}")
            return
        self.coordinator.order(target=str(target))
        self._embeddings = [*self._embeddings, target][-_KEPT:]
        for old in set(folder.glob("shared-*")).difference(self._embeddings):
            shutil.rmtree(old, ignore_errors=True)

    def _report(self, counts: list[Mapping[str, Any]]) -> None:
        figures = self.coordinator.figures
        lengths = [one["acceptance"] for one in counts if one.get("acceptance")]
        self.metrics = {
            "eagle/drafter_version": float(self._held),
            "eagle/trained_steps": float(figures.get("step", 0)),
            "eagle/samples": float(figures.get("read", 0)),
            "eagle/captured": float(sum(one.get("requests", 0) for one in counts)),
        }
        if lengths:
            self.metrics["eagle/acceptance_length"] = sum(lengths) / len(lengths)
        self.metrics |= _means(counts)
        if "loss" in figures:
            self.metrics["eagle/drafter_loss"] = float(figures["loss"])
        ledger.note(
            eagle_trainer={"state": self.coordinator.state, "pid": self.coordinator.pid, **self.metrics}
        )
        if self.coordinator.problem:
            self._warn(self.coordinator.problem)

    def _warn(self, problem: str) -> None:
        if problem != self._last_problem:
            logger.warning("%s", problem)
            ledger.note(eagle_problem=problem)
        self._last_problem = problem


def _means(counts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return rate and length of acceptance over the requests of all replicas that count them; empty if none does."""
    counting = [one for one in counts if one.get(REQUESTS)]
    requests = sum(one[REQUESTS] for one in counting)
    return {
        name: sum(one[name] * one[REQUESTS] for one in counting) / requests
        for name in (ACCEPT_RATE, ACCEPT_LENGTH)
        if requests
    }


def _with_device(settings: WorkerSettings) -> tuple[WorkerSettings, dict[str, str]]:
    """Return settings and environment that show the training process accelerator ``cuda:N`` of this machine:
    Ray hides all of them from the driver, its parent."""
    kind, _, number = settings.device.partition(":")
    if kind != "cuda" or not number:
        return settings, {}
    return replace(settings, device=kind), {"CUDA_VISIBLE_DEVICES": number}


MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"
_RPC_SECONDS = 600.0  # for a call to the replicas
_SERVERS = {"vllm": verl_vllm, "sglang": verl_sglang}
_metrics: dict[str, float] = {}  # of the last pause, until they are logged
_job: Job | None = None

patches = Patches("eagle", "verl>=0.9", scope="driver", remove_when=UNTIL_VERL)


@patches.wrap(
    f"{MANAGER}.sleep_replicas",
    relies_on="self.replicas",
    evidence="optional",  # only one of a job's drivers has it
    why="A drafter can be trained at no cost to the rollouts only while they rest.",
)
def sleep_replicas(original, self, *args: Any, **kwargs: Any) -> Any:
    """Start a slice of drafter training when a step's rollouts are complete; it ends with the next weight update."""
    return followed(lambda: _job and _job.rollouts_ended(), original, self, *args, **kwargs)


def _end_job(site: Site) -> None:
    global _job
    if _job is not None:
        _job.close()
        _job = None
    site.unwrap()


@patches.wrap(
    f"{MANAGER}.update_weights",
    relies_on=(
        "self.replicas",
        "verl.utils.ray_utils:auto_await",
        "verl.workers.rollout.replica:RolloutReplica.server_handle",
    ),
    evidence="update",
    when="anywhere=eagle.verl.validate_config",
    why="A drafter falls behind a policy in training, and verl sends the replicas nothing but the policy.",
    undo=_end_job,
)
def update_weights(original, self, global_steps: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Send every replica the newest drafter after each update of the policy, and the trainer the policy's embeddings
    and head."""
    return followed(
        lambda: _policy_updated(self, global_steps), original, self, global_steps, *args, **kwargs
    )


def _policy_updated(manager: Any, step: int | None) -> None:
    global _job
    if _job is None:
        settings = verl_config.settings(manager.replicas[0].config) if manager.replicas else None
        if settings is None:
            return
        ledger.role("driver")
        _job = Job(**settings)
    started = time.monotonic()

    def call(method: str, arguments: tuple) -> list[Any]:
        import ray

        start = _SERVERS[_job.settings["engine"]].start_call
        calls = [start(replica.server_handle, method, arguments) for replica in manager.replicas]
        return ray.get(calls, timeout=_RPC_SECONDS)

    _job.policy_updated(call, step)
    _metrics.update(_job.metrics)
    _metrics["timing_s/eagle"] = time.monotonic() - started


@patches.wrap(
    "verl.utils.tracking:Tracking.log",
    params=("data", "step"),
    evidence="optional",
    why="verl does not log what a drafter of its own training does.",
)
def tracking_log(original, self, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Add eagle/* to what the trainer logs next."""
    data = {**data, **_metrics}
    _metrics.clear()
    return original(self, data, *args, **kwargs)
