"""Co-train the drafter of one verl job: train from when the first replica has drained until the policy is updated, and send
it to every replica before the next rollouts begin.

Nothing here stops a job. Whatever fails, the target's verification keeps every token right; only speed is
lost, and the log, the ledger and the metrics say so."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.arming.site import Site
from flashpatch.decorate import Patches
from flashpatch.patches._shared.awaits import followed
from flashpatch.patches.eagle import verl_sglang, verl_vllm
from flashpatch.patches.eagle.drafter_refit.commands import FLUSH, SAVE_EMBEDDINGS, UPDATE
from flashpatch.patches.eagle.options import UNTIL_VERL
from flashpatch.patches.eagle.train.coordinator import Coordinator
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.verl import verl_config

logger = logging.getLogger("flashpatch.eagle")

Call = Callable[[str, tuple], list[Any]]
"""Calls a worker method on every replica; returns a list of its workers' answers per replica."""

_WAIT_SECONDS = 30.0  # for the trainer, before a step kills it
_LOOK_SECONDS = 1.0  # between two looks for a replica that has drained
_KEPT = 2  # folders of embeddings and head: the trainer's present and next one


class Job:
    """Train a drafter while replicas of one job have nothing to do.

    Args:
        settings: of the training process, without ``queue`` if that is the replicas', which report it.
        train_seconds: most seconds of a slice of training.
        every: train in every so many steps of the policy.

    Attributes:
        coordinator: of the training process; None until a replica has reported its sample directory.
        version: of the drafter that was sent last, also if not all replicas took it: those that did hold it.
        metrics: of the last pause, ``eagle/...``."""

    def __init__(self, settings: Mapping[str, Any], train_seconds: float, every: int = 1) -> None:
        self.settings, self.train_seconds, self.every = dict(settings), train_seconds, every
        self.coordinator: Coordinator | None = None
        self.version = 0
        self.metrics: dict[str, float] = {}
        self._sent: Path | None = None
        self._embeddings: list[Path] = []  # folders, the newest last
        self._held = 0  # version of the drafter that all replicas took last
        self._last_problem = ""
        self._updates = 0
        self._resting = threading.Event()  # set while there are no rollouts

    def rollouts_began(self, requests: Callable[[], Mapping[str, int]], beside: Set[str]) -> None:
        """Start a slice of training once a replica has drained while others have not, and stop it if it gets requests again.

        Args:
            requests: returns how many requests each replica has, by name.
            beside: names of the replicas on the trainer's device, which have to drain; empty: any will do."""
        resting = self._resting = threading.Event()

        def watch() -> None:
            was_free = trains = False
            while not resting.wait(_LOOK_SECONDS):
                try:
                    counts = requests()
                except Exception as error:  # a router that tells nobody
                    return logger.warning("the drafter is trained once all replicas rest: %s", error)
                idle = {name for name, count in counts.items() if not count}
                if resting.is_set() or len(idle) == len(counts):  # none has begun, or all have ended
                    continue
                is_free = bool(idle) and beside <= idle
                if is_free and was_free and not trains:
                    trains = self.coordinator.train(self.train_seconds)
                elif trains and not is_free:
                    self.coordinator.stop()
                    trains = False
                was_free = is_free

        if self.coordinator is not None and self._trains():
            threading.Thread(target=watch, name="flashpatch-drained", daemon=True).start()

    def rollouts_ended(self) -> None:
        """Start a slice of training, now that the replicas sleep, unless one has begun already."""
        self._resting.set()
        if self.coordinator is not None and self._trains():
            self.coordinator.train(self.train_seconds)

    def _trains(self) -> bool:
        """Whether the trainer has the next pause, and so needs the policy of now."""
        return self._updates % self.every == 0

    def policy_updated(self, call: Call, step: int | None) -> None:
        """Send the newest drafter to the replicas, which have a new policy and no rollout yet. Never raises."""
        self._updates += 1
        self._resting.set()
        try:
            self._exchange(call, step)
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")

    def _exchange(self, call: Call, step: int | None) -> None:
        reads = "queue" not in self.settings
        counts = [first for answers in call(FLUSH, (reads,)) for first in answers[:1] if first]
        if not self._start_trainer(counts):
            return
        self.coordinator.wait_idle(_WAIT_SECONDS)
        drafter = self.coordinator.drafter
        if drafter is not None and drafter != self._sent:
            self._send_drafter(call, drafter)
        if self._trains():
            self._send_embeddings(call, step)
        self._report(counts)

    def close(self) -> None:
        """End the training process."""
        self._resting.set()
        if self.coordinator is not None:
            self.coordinator.close()

    def _start_trainer(self, counts: Iterable[Mapping[str, Any]]) -> bool:
        """Start the trainer once the replicas report where samples are; return whether it runs."""
        if self.coordinator is not None:
            return True
        queues = sorted({str(one["queue"]) for one in counts if "queue" in one})
        if "queue" in self.settings:
            queues = [self.settings["queue"]]
            shutil.rmtree(queues[0], ignore_errors=True)  # what an earlier job left unread
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
        }
        if "queue" not in self.settings:
            self.metrics["eagle/captured"] = float(sum(one.get("requests", 0) for one in counts))
        if lengths:
            self.metrics["eagle/acceptance_length"] = sum(lengths) / len(lengths)
        if "loss" in figures:
            self.metrics["eagle/drafter_loss"] = float(figures["loss"])
        ledger.note(
            eagle_trainer={"state": self.coordinator.state, "pid": self.coordinator.pid, **self.metrics}
        )
        if self.coordinator.problem:
            self._warn(self.coordinator.problem)
        elif self.coordinator.counts["slices"] > 1 and not figures.get("trained"):
            least = self.coordinator.settings.least
            self._warn(f"the drafter is not trained: {figures.get('samples')} samples, and it needs {least}")

    def _warn(self, problem: str) -> None:
        if problem != self._last_problem:
            logger.warning("%s", problem)
            ledger.note(eagle_problem=problem)
        self._last_problem = problem


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
_balancer: Any = None  # verl's, an actor that knows how many requests each replica has
_metrics: dict[str, float] = {}  # of the last pause, until they are logged
_job: Job | None = None

patches = Patches("eagle", "verl>=0.9", scope="driver", remove_when=UNTIL_VERL)


@patches.wrap(
    "verl.workers.rollout.llm_server:LLMServerManager._init_global_load_balancer",
    params=(),
    relies_on="self.global_load_balancer",
    since={"0.9.1": ("verl.workers.rollout.router:RequestLoadBalancer.get_status",)},
    evidence="optional",
    why="A replica that has drained idles until the step's last response, and only verl's balancer knows which have.",
)
async def init_global_load_balancer(original, self) -> None:
    """Note the balancer, which is asked each second for each replica's requests."""
    global _balancer
    await original(self)
    _balancer = self.global_load_balancer


def _beside(replicas: Iterable[Any], device: str) -> set[str]:
    """Return the addresses of replicas on accelerator ``cuda:N`` of their nodes."""
    number = device.partition(":")[2]
    found = set()
    for one in replicas:
        first = one.replica_rank * one.world_size % one.gpus_per_node
        if number and first <= int(number) < first + one.world_size:
            found.add(one._server_address)
    return found


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
    import ray

    started = time.monotonic()

    def call(method: str, arguments: tuple) -> list[Any]:
        start = _SERVERS[_job.settings["engine"]].start_call
        calls = [start(replica.server_handle, method, arguments) for replica in manager.replicas]
        return ray.get(calls, timeout=_RPC_SECONDS)

    _job.policy_updated(call, step)
    _metrics.update(_job.metrics)
    _metrics["timing_s/eagle"] = time.monotonic() - started
    if _balancer is not None:

        def requests() -> Mapping[str, int]:
            return ray.get(_balancer.get_status.remote(), timeout=_RPC_SECONDS)["servers"]

        _job.rollouts_began(requests, _beside(manager.replicas, _job.settings["device"]))


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
